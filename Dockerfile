# One image for both daemons; docker-compose.yml says which runs where.

# A tag moves. Give the image that you have looked at by its digest (docs/supply-chain.md):
# --build-arg BASE=debian:bookworm-slim@sha256:...
ARG BASE=debian:bookworm-slim
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A CPU build of torch is a fifth of the size: give its index here, as in
# --build-arg PIP_OPTIONS="--index-url ...".
ARG PIP_OPTIONS=""
WORKDIR /src
# Everything but torch comes by the hashes in the lock. Which build of torch suits a machine, its owner decides:
# its version is pinned, its bytes are its index's.
COPY constraints.txt ./
COPY locks locks
RUN python3 -m venv /opt/atoll \
    && /opt/atoll/bin/pip install --no-cache-dir $PIP_OPTIONS --no-deps --require-hashes \
        -r locks/build.txt -r locks/runtime.txt \
    && /opt/atoll/bin/pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY atoll atoll
COPY coordinator coordinator
COPY worker worker
COPY hostos hostos
COPY protos protos
COPY strategies strategies
COPY compressors compressors
RUN /opt/atoll/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation . \
    && /opt/atoll/bin/pip check

# Guests' manners: no root inside, state in one folder that a volume keeps. What libraries would keep in a home
# goes to /tmp: the root may be read-only.
RUN useradd --create-home --uid 10001 atoll \
    && mkdir -p /state /tokens/join /tokens/owner /tokens/page && chown -R atoll /state /tokens
USER atoll
WORKDIR /home/atoll
ENV PATH=/opt/atoll/bin:$PATH ATOLL_STATE=/state HOME=/tmp
VOLUME ["/state"]
CMD ["atoll", "--help"]
