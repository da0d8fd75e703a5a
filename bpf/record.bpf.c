// SPDX-License-Identifier: GPL-2.0-or-later OR BSD-2-Clause
// Recorder of whole driver calls, for test data: not part of the exporter. One record per ioctl on a device of the chosen majors.
#include "common.h"
#include <bpf/bpf_core_read.h>

// The parts of kernel structures that lead from a descriptor to its device.
#define KERNEL __attribute__((preserve_access_index))
struct inode {
	u32 i_rdev;
} KERNEL;
struct file {
	struct inode *f_inode;
} KERNEL;
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} KERNEL;
struct files_struct {
	struct fdtable *fdt;
} KERNEL;
struct task_struct {
	struct files_struct *files;
} KERNEL;

#define IN 64
#define OUT 192
#define DEEP 160

struct pending {
	u64 ts, arg;
	u32 cmd, rdev;
	u8 in[IN];
};

struct record {
	u64 ts, dur, cgroup;
	s64 ret;
	u32 tgid, tid, cmd, rdev;
	char comm[16];
	u8 in[IN], out[OUT], deep[DEEP];
};

const struct record *unused __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, u32);
	__type(value, u8);
} majors SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u64);
	__type(value, struct pending);
} pending SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 20);
} records SEC(".maps");

SEC("tracepoint/syscalls/sys_enter_ioctl")
int enter(struct syscall_enter *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 thread = bpf_get_current_pid_tgid();
	u32 fd = ctx->args[0], major;
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files, *file = 0;
	struct pending p = {};

	if (fd >= BPF_CORE_READ(table, max_fds))
		return 0;
	files = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), &files[fd]);
	p.rdev = BPF_CORE_READ(file, f_inode, i_rdev);
	major = p.rdev >> 20;
	if (!bpf_map_lookup_elem(&majors, &major))
		return 0;
	p.cmd = ctx->args[1];
	p.arg = ctx->args[2];
	bpf_probe_read_user(p.in, sizeof(p.in), (void *)p.arg);
	p.ts = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&pending, &thread, &p, BPF_ANY))
		count_lost();
	return 0;
}

SEC("tracepoint/syscalls/sys_exit_ioctl")
int leave(struct syscall_exit *ctx)
{
	u64 thread = bpf_get_current_pid_tgid(), params = 0;
	struct pending *p = bpf_map_lookup_elem(&pending, &thread);
	struct record *r;

	if (!p)
		return 0;
	r = bpf_ringbuf_reserve(&records, sizeof(*r), 0);
	if (!r) {
		count_lost();
		bpf_map_delete_elem(&pending, &thread);
		return 0;
	}
	r->ts = p->ts;
	r->dur = bpf_ktime_get_ns() - p->ts;
	r->cgroup = bpf_get_current_cgroup_id();
	r->ret = ctx->ret;
	r->tgid = thread >> 32;
	r->tid = thread;
	r->cmd = p->cmd;
	r->rdev = p->rdev;
	bpf_get_current_comm(r->comm, sizeof(r->comm));
	__builtin_memcpy(r->in, p->in, IN);
	// The block may end where its page does; a read that fails leaves zeros, so then as much as the first reads gave.
	if (bpf_probe_read_user(r->out, OUT, (void *)p->arg) && bpf_probe_read_user(r->out, IN, (void *)p->arg))
		bpf_probe_read_user(r->out, 48, (void *)p->arg);
	__builtin_memset(r->deep, 0, DEEP);
	// RM_ALLOC and RM_CONTROL carry a pointer to parameters of their own at offset 16.
	if ((p->rdev >> 20) == 195 && ((p->cmd & 0xff) == 0x2b || (p->cmd & 0xff) == 0x2a)) {
		__builtin_memcpy(&params, r->out + 16, sizeof(params));
		if (params && bpf_probe_read_user(r->deep, DEEP, (void *)params) && bpf_probe_read_user(r->deep, 128, (void *)params))
			bpf_probe_read_user(r->deep, 16, (void *)params);
	}
	bpf_ringbuf_submit(r, 0);
	bpf_map_delete_elem(&pending, &thread);
	return 0;
}
