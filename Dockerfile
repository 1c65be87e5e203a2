# A container with the server and the kld tool, running as an ordinary user.
#
#   make image                                                  CPU; BUILDER=podman or buildah, IMAGE=NAME:TAG
#   make image IMAGE=kld:0.1.0-cuda BUILD_BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 BASE=ubuntu:24.04
#                                                               with the CUDA back end, its runtime linked in; for
#                                                               some cards only: IMAGE_ARGS='--build-arg CUDA_ARCHS=90'
#
# HTTP on 127.0.0.1:8080 of the host, with its network or with one of its own; the last one on a card, with the NVIDIA
# container toolkit:
#
#   docker run --rm --read-only --stop-timeout 20 --network host kld:0.1.0
#   docker run --rm --read-only --stop-timeout 20 -p 127.0.0.1:8080:8080 kld:0.1.0 --http 0.0.0.0:8080 --insecure-bind
#   docker run --rm --read-only --stop-timeout 20 --gpus all -p 127.0.0.1:8080:8080 kld:0.1.0-cuda --backend cuda --http 0.0.0.0:8080 --insecure-bind
#
# --stop-timeout: a server that is told to stop has --drain-ms (10 s) for what is in flight, and docker kills after as much.
# --insecure-bind: the published address decides who may ask, which is the host's loopback; at another one it is --tokens.
# podman has the same options, but for the card: --device nvidia.com/gpu=all.
#
# BASE needs a glibc as new as that of BUILD_BASE and nothing else: no command is run in it, neither here nor later.
# What the image brings beside it, in which version, is in /opt/kld/share/kld/kld.cdx.json (CycloneDX); the base's own
# list of packages stays.
ARG BUILD_BASE=debian:12-slim
ARG BASE=debian:12-slim

FROM ${BUILD_BASE} AS build
ARG REVISION=unknown
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends make >/dev/null \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/deps.sh deploy/
RUN deploy/deps.sh build dist
COPY . .
ARG CUDA_ARCHS
RUN make all ${CUDA_ARCHS:+"CUDA_ARCHS=$CUDA_ARCHS"} && REVISION="$REVISION" deploy/dist.sh build /dist CUDA=$(make -s print-cuda) \
    && mkdir -p /image/opt/kld/share /image/run/kld \
    && cp -a /dist/bin /dist/lib /image/opt/kld/ && cp -a /dist/share/kld /image/opt/kld/share/ \
    && rm -r /image/opt/kld/lib/libkld.a /image/opt/kld/lib/pkgconfig && cp LICENSE /image/opt/kld/

FROM ${BASE}
ARG BASE
ARG REVISION=unknown
ARG VERSION=unknown
LABEL org.opencontainers.image.title="kld" \
      org.opencontainers.image.description="KL divergences and their gradients as a service" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.licenses="MIT"
COPY --from=build /image/opt/kld /opt/kld
COPY --from=build --chown=10001:10001 /image/run/kld /run/kld
# The one folder that is written to: the Unix socket lies there.
VOLUME /run/kld
USER 10001:10001
ENV PATH=/opt/kld/bin:$PATH KLD_UNIX=/run/kld/kld.sock KLD_SERVER=unix:/run/kld/kld.sock
EXPOSE 8080
STOPSIGNAL SIGTERM
# Of the first device: whoever gives it several asks at --metrics-http, as compose.gpu.yaml does.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["/opt/kld/bin/kld", "ping", "--count", "1", "--timeout", "2"]
ENTRYPOINT ["/opt/kld/bin/kld-server"]
