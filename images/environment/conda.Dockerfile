# The image of a lab with `image: {conda: environment.yml}`: the environment of that file, created by
# micromamba. labctl adds no code: it is mounted when a run starts.
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

ARG FILE=environment.yml
COPY ${FILE} /opt/lab/
RUN set -eu; \
    if ! command -v micromamba >/dev/null; then \
        echo "The base image has no micromamba, which image.conda needs."; \
        echo "Set base_image to an image with micromamba, or unset it."; \
        exit 1; \
    fi; \
    micromamba create --yes --prefix /opt/env --file "/opt/lab/${FILE##*/}"; \
    micromamba clean --all --yes
ENV CONDA_PREFIX=/opt/env PATH=/opt/env/bin:${PATH}

# Logs appear at once, and Python writes no __pycache__ to the mounted code.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT []
WORKDIR /lab/code
