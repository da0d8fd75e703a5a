// SPDX-License-Identifier: GPL-2.0-or-later OR BSD-2-Clause
// What every program here begins with: types, licence, and the count of what could not be kept.
#pragma once
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

typedef __u8 u8;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;

// The records of the syscall tracepoints.
struct syscall_enter {
	u64 common;
	s64 number;
	u64 args[6];
};
struct syscall_exit {
	u64 common;
	s64 number;
	s64 ret;
};

char LICENSE[] SEC("license") = "Dual BSD/GPL";

// How many causes of loss a program tells apart.
#ifndef LOST_CAUSES
#define LOST_CAUSES 1
#endif

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LOST_CAUSES);
	__type(key, u32);
	__type(value, u64);
} lost SEC(".maps");

static __always_inline void count_lost_by(u32 cause)
{
	u64 *n = bpf_map_lookup_elem(&lost, &cause);

	if (n)
		__sync_fetch_and_add(n, 1);
}

static __always_inline void count_lost(void)
{
	count_lost_by(0);
}
