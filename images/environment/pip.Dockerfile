# The image of a lab with `image: {python: ..., requirements: ...}`: that Python and the packages of
# requirements.txt or pyproject.toml. A run's code is mounted over /lab/code: projects below it are
# installed in editable mode, so that the run imports its own copy.
# The file uses only features of both Docker's classic builder and BuildKit.
ARG BASE=python:3.12-slim
FROM ${BASE}
USER root

# Installs Python if the base has none, or one that cannot create virtual environments.
RUN set -eu; \
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            ca-certificates python3 python3-venv; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi

# Package indexes: build arguments and not ENV, so that they do not stay in the image's settings.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX

# uv has an environment of its own, and so does not mix with the lab's packages.
RUN set -eu; \
    python3 -m venv /opt/uv; \
    if ! /opt/uv/bin/python -m pip install --no-cache-dir --disable-pip-version-check uv; then \
        echo "uv, which installs the packages, was not found. A wheelhouse needs it too:"; \
        echo "pip download -d WHEELHOUSE uv"; \
        exit 1; \
    fi

# The base's own Python if it has this version, or if the version is empty. Otherwise uv downloads one,
# to a directory that the account of a run can read. pip is there for people who type `pip install` in a run.
ARG PYTHON=3.12
RUN set -eu; \
    export UV_PYTHON_INSTALL_DIR=/opt/python UV_PYTHON_PREFERENCE=system UV_SYSTEM_CERTS=1; \
    if ! /opt/uv/bin/uv venv --no-cache ${PIP_NO_INDEX:+--no-python-downloads} \
            ${PYTHON:+--python "${PYTHON}"} /opt/venv; then \
        echo "This base image has $(python3 -V), and Python ${PYTHON} could not be downloaded."; \
        echo "In lab.yaml, set image.python to a version that is available."; \
        exit 1; \
    fi; \
    /opt/venv/bin/python -m ensurepip --default-pip >/dev/null
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:${PATH}

# For packages from repositories: "git", else empty.
ARG GIT=""
RUN set -eu; \
    if [ -n "${GIT}" ] && ! command -v git >/dev/null; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates git; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi

# The best version of all indexes counts, as with pip. Compiled modules start faster: a run may not
# write them. A version that comes from git's tags is not known here: labctl sends no .git.
ARG FILE=requirements.txt
WORKDIR /lab/code
COPY code/ /lab/code/
RUN set -eu; \
    export UV_SYSTEM_CERTS=1 SETUPTOOLS_SCM_PRETEND_VERSION=0; \
    /opt/uv/bin/uv pip install --no-cache --compile-bytecode --index-strategy unsafe-best-match \
        ${PIP_INDEX_URL:+--default-index "${PIP_INDEX_URL}"} \
        ${PIP_EXTRA_INDEX_URL:+--index "${PIP_EXTRA_INDEX_URL}"} \
        ${PIP_FIND_LINKS:+--find-links "${PIP_FIND_LINKS}"} \
        ${PIP_NO_INDEX:+--no-index} \
        --requirements "/lab/code/${FILE}"

# Logs appear at once, and Python writes no __pycache__ to the mounted code.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
