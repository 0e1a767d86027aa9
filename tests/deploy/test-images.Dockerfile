# Images that stand in for public ones where no registry of images can be reached. They are made on
# distca-test/bare, which tests/deploy/test_base.py imports from debootstrap: Debian without Python, as
# the CUDA base is.

# For the Python base.
FROM distca-test/bare AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

# For Prometheus.
FROM distca-test/bare AS prometheus
RUN apt-get update \
 && apt-get install --yes --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["/usr/bin/prometheus"]
