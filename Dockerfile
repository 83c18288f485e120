# One image for both daemons; docker-compose.yml says which runs where.
FROM debian:bookworm-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A CPU build of torch is a fifth of the size: give its index here, as in
# --build-arg PIP_OPTIONS="--index-url ...".
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN python3 -m venv /opt/atoll \
    && /opt/atoll/bin/pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt torch==2.13.0
COPY atoll atoll
COPY coordinator coordinator
COPY worker worker
COPY protos protos
COPY strategies strategies
COPY compressors compressors
RUN /opt/atoll/bin/pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt .

# Guests' manners: no root inside, state in one folder that a volume keeps.
RUN useradd --create-home --uid 10001 atoll && mkdir /state /invitation && chown atoll /state /invitation
USER atoll
WORKDIR /home/atoll
ENV PATH=/opt/atoll/bin:$PATH ATOLL_STATE=/state
VOLUME ["/state"]
CMD ["atoll", "--help"]
