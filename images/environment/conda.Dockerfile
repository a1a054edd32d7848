# The image of a lab with `image: {conda: environment.yml}`: the environment of that file, created by
# micromamba. A run's code is mounted over /lab/code: projects below it are installed in editable mode,
# so that the run imports its own copy.
ARG BASE=mambaorg/micromamba:2.0.5
FROM ${BASE}
USER root

# For the `pip:` section of the file. pip reads these variables by itself.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# A build sees no GPU. With a version of CUDA here, conda chooses packages for GPUs.
ARG CONDA_OVERRIDE_CUDA

# For packages from repositories: "git", else empty.
ARG GIT=""
RUN set -eu; \
    if [ -n "${GIT}" ] && ! command -v git >/dev/null; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates git; \
        rm -rf /var/lib/apt/lists/*; \
    fi

# micromamba reads the paths of the `pip:` section as relative to the file.
ARG FILE=environment.yml
WORKDIR /lab/code
COPY code/ /lab/code/
RUN set -eu; \
    if ! command -v micromamba >/dev/null; then \
        echo "The base image has no micromamba, which image.conda needs."; \
        echo "Your setting LABCTL_BASE_IMAGE or base_image names it."; \
        exit 1; \
    fi; \
    micromamba create --yes --prefix /opt/env --file "/lab/code/${FILE}"; \
    micromamba clean --all --yes
ENV CONDA_PREFIX=/opt/env PATH=/opt/env/bin:${PATH}

# Logs appear at once, and Python writes no __pycache__ to the mounted code.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT []
