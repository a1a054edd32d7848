# labctl itself, with OpenSSH, for machines without Python:
#
#   docker build -t labctl .
#   docker run --rm labctl --help
#   docker run --rm -it -v "$PWD:/lab" -v labctl-home:/home/labctl labctl up
#
# The state, the keys and the ssh configuration of your servers live in /home/labctl: keep it in a
# volume, as above, or labctl forgets its servers. `provider: local` needs a Docker Engine and is
# not what this image is for.
#
# Any base with apt will do, a bare Debian too:
#   docker build -t labctl --build-arg BASE=debian:12 .
# Without a package index, with wheels in the context's .wheelhouse/:
#   docker build -t labctl --build-arg PIP_FIND_LINKS=/src/.wheelhouse --build-arg PIP_NO_INDEX=1 .
ARG BASE=python:3.11-slim
FROM ${BASE} AS built

RUN set -eu; \
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            ca-certificates python3 python3-venv; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi

# pip reads these from the environment; as build arguments they do not stay in the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
COPY . /src
RUN python3 -m venv /opt/labctl \
    && /opt/labctl/bin/pip install --no-cache-dir --disable-pip-version-check /src

FROM ${BASE}
RUN set -eu; \
    apt-get update; \
    packages="ca-certificates openssh-client"; \
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        packages="$packages python3"; \
    fi; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    useradd --create-home --uid 1000 --shell /bin/bash labctl; \
    install -d -o labctl -g labctl /lab
COPY --from=built /opt/labctl /opt/labctl
ENV PATH=/opt/labctl/bin:${PATH}
USER labctl
WORKDIR /lab
ENTRYPOINT ["labctl"]
CMD ["--help"]
