# Built by `make image`: nothing but the static program.
FROM scratch
ARG BIN=bin
COPY ${BIN}/gpu-exporter /gpu-exporter
EXPOSE 9400
ENTRYPOINT ["/gpu-exporter"]
