"""Models of transformers: what they call, their documents, their core attention at home."""
