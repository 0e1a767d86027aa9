"""``distca doctor``: what would keep a node from serving or training well, before it does."""
