# Built after `make build`: nothing but the static program.
FROM scratch
COPY bin/gpu-exporter /gpu-exporter
EXPOSE 9400
ENTRYPOINT ["/gpu-exporter"]
