"""Applications above the services: training, previews, checks of a machine, the live view."""
