package tracer

//go:generate go tool bpf2go -cc clang-16 -strip llvm-strip-16 -target amd64,arm64 -type open_event -type end_event -type call_event -type xid_event -type status_rules -type holder -type call_key -type call_count -type error_key -type open_key -type open_count -type group_count -type node -type kind -type cause -type table bpf ../bpf/tracer.bpf.c -- -O2 -g -Wall -Werror -mcpu=v2 -fdebug-prefix-map=$PWD=. -I/usr/include/x86_64-linux-gnu
