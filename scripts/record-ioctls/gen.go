package main

//go:generate go tool bpf2go -cc clang-16 -strip llvm-strip-16 -target amd64,arm64 -type record record ../../bpf/record.bpf.c -- -O2 -g -Wall -Werror -mcpu=v2 -fdebug-prefix-map=$PWD=. -I/usr/include/x86_64-linux-gnu
