# A container with the server and the kld tool, running as an ordinary user.
#
#   docker build -t kld .                                       CPU
#   docker build -t kld --build-arg BUILD_BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#                --build-arg BASE=ubuntu:24.04 .                with the CUDA back end
#   docker run --rm --network host kld                          HTTP on 127.0.0.1:8080
#   docker run --rm -p 8080:8080 kld --http 0.0.0.0:8080 --insecure-bind
ARG BUILD_BASE=debian:12-slim
ARG BASE=debian:12-slim

FROM ${BUILD_BASE} AS build
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends make git ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN deploy/deps.sh build dist
RUN make dist && mkdir /kld && tar -xzf build/kld-*.tar.gz -C /kld --strip-components 1 \
    && rm -r /kld/lib/libkld.a /kld/lib/pkgconfig

FROM ${BASE}
COPY --from=build /kld/bin /opt/kld/bin
COPY --from=build /kld/lib /opt/kld/lib
RUN useradd --system --uid 10001 --no-create-home kld \
    && install -d -o kld -g kld -m 755 /run/kld \
    && ln -s /opt/kld/bin/kld /usr/local/bin/kld
USER kld
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["/opt/kld/bin/kld", "ping", "--server", "unix:/run/kld/kld.sock"]
ENTRYPOINT ["/opt/kld/bin/kld-server"]
