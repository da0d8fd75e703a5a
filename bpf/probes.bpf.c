// SPDX-License-Identifier: GPL-2.0-or-later OR BSD-2-Clause
// Uprobes on libcuda's exported functions. Totals per process stay in the kernel; nothing is sent per call.
#include "common.h"

// The registers of the probed thread, as the kernel saves them.
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#define ARG1(c) ((c)->di)
#define ARG2(c) ((c)->si)
#define ARG3(c) ((c)->dx)
#define ARG4(c) ((c)->cx)
#define RESULT(c) ((c)->ax)
#define IP(c) ((c)->ip)
#define SP(c) ((c)->sp)
#define RETURN_POP 8
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	unsigned long regs[31], sp, pc, pstate;
};
#define ARG1(c) ((c)->regs[0])
#define ARG2(c) ((c)->regs[1])
#define ARG3(c) ((c)->regs[2])
#define ARG4(c) ((c)->regs[3])
#define RESULT(c) ((c)->regs[0])
#define IP(c) ((c)->pc)
#define SP(c) ((c)->sp)
#define RETURN_POP 0
#endif

// Whether the kernel has attach cookies (5.15). Without, calls inside the library cannot be told from the program's.
volatile const bool have_cookies = true;

#define RANGES 64

struct range {
	u64 start, end;
};

struct totals {
	u64 htod, dtoh, launches, allocated;
	u64 undecided; // bytes of copies whose direction could not be told
	struct range ranges[RANGES]; // live device memory, to tell the direction of unified copies
};

struct pointer_key {
	u64 pointer;
	u32 pid;
	u32 handle; // 1: a cuMemCreate handle, not an address
};

struct request {
	u64 sp, out, size, pitch, height;
	u32 handle, managed;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u32);
	__type(value, struct totals);
} processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct pointer_key);
	__type(value, u64);
} pointers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, u64);
	__type(value, struct request);
} requests SEC(".maps");

// A process is made here rather than on the stack, which it does not fit.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct totals);
} empty SEC(".maps");

static __always_inline struct totals *current_totals(void)
{
	u32 pid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct totals *t = bpf_map_lookup_elem(&processes, &pid), *fresh;

	if (t)
		return t;
	fresh = bpf_map_lookup_elem(&empty, &zero);
	if (fresh)
		bpf_map_update_elem(&processes, &pid, fresh, BPF_NOEXIST);
	t = bpf_map_lookup_elem(&processes, &pid);
	if (!t)
		count_lost();
	return t;
}

// internal tells whether libcuda itself called: then the exported function that it was called from has been counted.
// The cookie holds the function's offset in the loaded library (high half) and the library's loaded size (low half).
static __always_inline bool internal(struct pt_regs *ctx)
{
	u64 cookie, base, caller = 0;

	if (!have_cookies)
		return false;
	cookie = bpf_get_attach_cookie(ctx);
	if (!cookie)
		return false;
#if defined(__TARGET_ARCH_x86)
	bpf_probe_read_user(&caller, sizeof(caller), (void *)SP(ctx));
#else
	caller = ctx->regs[30];
#endif
	base = IP(ctx) - (cookie >> 32);
	return caller - base < (cookie & 0xffffffff);
}

static __always_inline int copied(struct pt_regs *ctx, bool htod)
{
	struct totals *t;

	if (internal(ctx))
		return 0;
	t = current_totals();
	if (t)
		__sync_fetch_and_add(htod ? &t->htod : &t->dtoh, ARG3(ctx));
	return 0;
}

SEC("uprobe")
int copy_htod(struct pt_regs *ctx)
{
	return copied(ctx, true);
}

SEC("uprobe")
int copy_dtoh(struct pt_regs *ctx)
{
	return copied(ctx, false);
}

#define MEMORY_HOST 1
#define MEMORY_DEVICE 2
#define MEMORY_ARRAY 3
#define MEMORY_UNIFIED 4

// direction books a copy between two kinds of memory. Unified addresses are looked up among the live device memory.
static __always_inline void direction(struct totals *t, u32 dst_type, u64 dst, u32 src_type, u64 src, u64 bytes)
{
	bool dst_device = dst_type == MEMORY_DEVICE || dst_type == MEMORY_ARRAY;
	bool src_device = src_type == MEMORY_DEVICE || src_type == MEMORY_ARRAY;
	bool unified = dst_type == MEMORY_UNIFIED || src_type == MEMORY_UNIFIED;

	if (unified) {
		for (int i = 0; i < RANGES; i++) {
			u64 start = t->ranges[i].start, size = t->ranges[i].end - start;

			if (dst_type == MEMORY_UNIFIED && dst - start < size)
				dst_device = true;
			if (src_type == MEMORY_UNIFIED && src - start < size)
				src_device = true;
		}
	}
	if (dst_device && !src_device)
		__sync_fetch_and_add(&t->htod, bytes);
	else if (src_device && !dst_device)
		__sync_fetch_and_add(&t->dtoh, bytes);
	else if (unified && !dst_device && !src_device)
		__sync_fetch_and_add(&t->undecided, bytes);
}

SEC("uprobe")
int copy_unified(struct pt_regs *ctx)
{
	struct totals *t;

	if (internal(ctx))
		return 0;
	t = current_totals();
	if (t)
		direction(t, MEMORY_UNIFIED, ARG1(ctx), MEMORY_UNIFIED, ARG2(ctx), ARG3(ctx));
	return 0;
}

// CUDA_MEMCPY2D_v2 and CUDA_MEMCPY3D_v2.
struct copy2d {
	u64 src_x, src_y;
	u32 src_type, pad1;
	u64 src_host, src_device, src_array, src_pitch;
	u64 dst_x, dst_y;
	u32 dst_type, pad2;
	u64 dst_host, dst_device, dst_array, dst_pitch;
	u64 width, height;
};

struct copy3d {
	u64 src_x, src_y, src_z, src_lod;
	u32 src_type, pad1;
	u64 src_host, src_device, src_array, reserved0, src_pitch, src_height;
	u64 dst_x, dst_y, dst_z, dst_lod;
	u32 dst_type, pad2;
	u64 dst_host, dst_device, dst_array, reserved1, dst_pitch, dst_height;
	u64 width, height, depth;
};

SEC("uprobe")
int copy_2d(struct pt_regs *ctx)
{
	struct copy2d c;
	struct totals *t;

	if (internal(ctx) || bpf_probe_read_user(&c, sizeof(c), (void *)ARG1(ctx)))
		return 0;
	t = current_totals();
	if (t)
		direction(t, c.dst_type, c.dst_device, c.src_type, c.src_device, c.width * c.height);
	return 0;
}

SEC("uprobe")
int copy_3d(struct pt_regs *ctx)
{
	struct copy3d c;
	struct totals *t;

	if (internal(ctx) || bpf_probe_read_user(&c, sizeof(c), (void *)ARG1(ctx)))
		return 0;
	t = current_totals();
	if (t)
		direction(t, c.dst_type, c.dst_device, c.src_type, c.src_device, c.width * c.height * c.depth);
	return 0;
}

SEC("uprobe")
int launch(struct pt_regs *ctx)
{
	struct totals *t;

	if (internal(ctx))
		return 0;
	t = current_totals();
	if (t)
		__sync_fetch_and_add(&t->launches, 1);
	return 0;
}

static __always_inline int begin(struct pt_regs *ctx, struct request *r)
{
	u64 thread = bpf_get_current_pid_tgid();

	if (internal(ctx))
		return 0;
	r->sp = SP(ctx);
	r->out = ARG1(ctx);
	bpf_map_update_elem(&requests, &thread, r, BPF_ANY);
	return 0;
}

SEC("uprobe")
int alloc(struct pt_regs *ctx)
{
	struct request r = {.size = ARG2(ctx)};

	return begin(ctx, &r);
}

SEC("uprobe")
int alloc_managed(struct pt_regs *ctx)
{
	struct request r = {.size = ARG2(ctx), .managed = 1};

	return begin(ctx, &r);
}

SEC("uprobe")
int alloc_pitch(struct pt_regs *ctx)
{
	struct request r = {.pitch = ARG2(ctx), .height = ARG4(ctx)};

	return begin(ctx, &r);
}

SEC("uprobe")
int alloc_create(struct pt_regs *ctx)
{
	struct request r = {.size = ARG2(ctx), .handle = 1};
	u32 location = 0;

	// CUmemAllocationProp: location.type at 8; 1 is a device, others are host memory.
	bpf_probe_read_user(&location, sizeof(location), (void *)(ARG3(ctx) + 8));
	if (location != 1)
		return 0;
	return begin(ctx, &r);
}

SEC("uretprobe")
int alloc_done(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct request *r = bpf_map_lookup_elem(&requests, &thread), request;
	struct pointer_key key = {.pid = thread >> 32};
	struct totals *t;
	u64 pitch = 0;

	if (!r)
		return 0;
	request = *r;
	if (SP(ctx) != request.sp + RETURN_POP)
		return 0; // the return of a call within
	bpf_map_delete_elem(&requests, &thread);
	if ((u32)RESULT(ctx) != 0)
		return 0;
	if (bpf_probe_read_user(&key.pointer, sizeof(key.pointer), (void *)request.out) || !key.pointer)
		return 0;
	if (request.pitch) {
		if (bpf_probe_read_user(&pitch, sizeof(pitch), (void *)request.pitch))
			return 0;
		request.size = pitch * request.height;
	}
	key.handle = request.handle;
	t = current_totals();
	if (!t)
		return 0;
	if (bpf_map_update_elem(&pointers, &key, &request.size, BPF_NOEXIST)) {
		count_lost();
		return 0;
	}
	__sync_fetch_and_add(&t->allocated, request.size);
	if (request.handle || request.managed)
		return 0; // no device address, or one that may be on either side
	for (int i = 0; i < RANGES; i++) {
		if (t->ranges[i].end == 0) {
			t->ranges[i].start = key.pointer;
			t->ranges[i].end = key.pointer + request.size;
			break;
		}
	}
	return 0;
}

static __always_inline int freed(struct pt_regs *ctx, u32 handle)
{
	struct pointer_key key = {.pointer = ARG1(ctx), .pid = bpf_get_current_pid_tgid() >> 32, .handle = handle};
	u64 *size = bpf_map_lookup_elem(&pointers, &key), bytes;
	struct totals *t;

	if (!size)
		return 0;
	bytes = *size;
	if (bpf_map_delete_elem(&pointers, &key))
		return 0; // another thread was faster
	t = current_totals();
	if (!t)
		return 0;
	__sync_fetch_and_add(&t->allocated, -bytes);
	if (handle)
		return 0;
	for (int i = 0; i < RANGES; i++) {
		if (t->ranges[i].start == key.pointer && t->ranges[i].end) {
			t->ranges[i].end = 0;
			t->ranges[i].start = 0;
			break;
		}
	}
	return 0;
}

SEC("uprobe")
int free_pointer(struct pt_regs *ctx)
{
	return freed(ctx, 0);
}

SEC("uprobe")
int free_handle(struct pt_regs *ctx)
{
	return freed(ctx, 1);
}
