#!/bin/sh
# Removes every container, volume and network of the engine inside; images and build cache stay.
# Run when a server ends, since the next server reuses /var/lib/docker.
docker ps --all --quiet --no-trunc | xargs -r docker rm --force --volumes
docker volume ls --quiet | xargs -r docker volume rm --force
docker network prune --force
