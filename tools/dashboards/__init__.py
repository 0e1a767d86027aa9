"""The Grafana dashboards, from which ``helm/distca/dashboards`` is generated."""
