// SPDX-License-Identifier: GPL-2.0-or-later OR BSD-2-Clause
// The kernel tracer: who opens an NVIDIA device, what they ask the driver for, when they end. Opens and calls are counted here; the ring
// buffer carries only what changes who holds what. A device is known by the device number of its inode, never by its name.
#define LOST_CAUSES 9
#include "common.h"
#include <bpf/bpf_core_read.h>

typedef __u16 u16;
typedef __s32 s32;

// The parts of kernel structures that are read.
#define KERNEL __attribute__((preserve_access_index))
typedef struct {
	int counter;
} atomic_t;
struct inode {
	u32 i_rdev;
} KERNEL;
struct file {
	struct inode *f_inode;
} KERNEL;
struct filename {
	const char *name;
} KERNEL;
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} KERNEL;
struct files_struct {
	struct fdtable *fdt;
} KERNEL;
struct kernfs_node {
	const char *name;
	u64 id;
} KERNEL;
struct cgroup {
	struct kernfs_node *kn;
} KERNEL;
struct cgroup_subsys_state {
	struct cgroup *cgroup;
} KERNEL;
struct css_set {
	struct cgroup_subsys_state *subsys[4];
	struct cgroup *dfl_cgrp;
} KERNEL;
struct signal_struct {
	atomic_t live;
	int group_exit_code;
	unsigned int flags;
} KERNEL;
struct task_struct {
	int pid, tgid, exit_code;
	u64 start_boottime;
	char comm[16];
	struct task_struct *group_leader;
	struct files_struct *files;
	struct css_set *cgroups;
	struct signal_struct *signal;
} KERNEL;

// Kinds of device nodes. The last two are rules for a major, not kinds.
enum node { NODE_NONE, NODE_GPU, NODE_CTL, NODE_UVM, NODE_CAPS, RULE_RM, RULE_MINORS };

enum kind { KIND_OPEN = 1, KIND_USE, KIND_CLOSE, KIND_CALL, KIND_FORK, KIND_EXEC, KIND_EXIT, KIND_XID };

enum cause { LOST_RING, LOST_HOLDERS, LOST_THREADS, LOST_CALLS, LOST_ERRORS, LOST_OPENS, LOST_GROUPS, LOST_RATE, LOST_SHARE };

struct header {
	u64 time; // CLOCK_MONOTONIC
	u64 start; // of the process, ns after boot
	u64 group; // id of its control group
	u32 tgid, tid, kind, node;
	char comm[16];
};

#define CGROUP_NAME 128

// KIND_OPEN, and KIND_USE: a call on a device by a process that was not seen to get it.
struct open_event {
	struct header h;
	u64 file;
	u32 minor;
	s32 result;
	u32 first; // the process held nothing before
	u32 unused;
	char cgroup[CGROUP_NAME]; // last component of the path
};

// KIND_CLOSE and KIND_EXEC are a header alone.
struct end_event {
	struct header h;
	u32 code; // as of wait(2)
	u32 child; // KIND_FORK: the new process
	u64 child_start;
};

#define IN 16
#define OUT 192
#define DEEP 128

struct call_event {
	struct header h;
	u64 entry, seq, file;
	s64 ret;
	u32 cmd, out_len, deep_len, unused;
	u8 in[IN], out[OUT], deep[DEEP];
};

struct xid_event {
	struct header h;
	u64 code;
	char dev[32];
	char msg[160];
};

const struct open_event *unused_open __attribute__((unused));
const struct end_event *unused_end __attribute__((unused));
const struct call_event *unused_call __attribute__((unused));
const struct xid_event *unused_xid __attribute__((unused));
const enum node *unused_node __attribute__((unused));
const enum kind *unused_kind __attribute__((unused));
const enum cause *unused_cause __attribute__((unused));

// Fixed when the programs are loaded.
#define PREFIX 64
volatile const char prefix[PREFIX] = "/dev/nvidia"; // names whose failed opens are counted: a failed open has no inode
volatile const u32 prefix_len = 11;
volatile const bool cgroup_v1 = false; // controllers are mounted in version 1: the first that is tells containers apart
volatile const u32 cgroup_at = 0; // which that is, by the kernel's numbers
volatile const bool have_task_btf = false; // kernel 5.11: fields of the current task are read without a call for each
volatile const u32 open_rate = 512; // records of one process a second; opens beyond are counted only
volatile const u32 call_rate = 20000; // calls beyond are lost for the ledger
volatile const u32 group_rate = 40000; // records of one control group a second; what is beyond is lost for its processes
volatile const u32 xid_dev_at = 8, xid_code_at = 16, xid_code_size = 8, xid_msg_at = 24; // of the driver's tracepoint

// What may change while the programs run: the driver's version. Offsets of status words plus one; 0: none.
struct status_rules {
	u8 rm_status[256];
	u16 uvm_status[128];
	u8 alloc_status_40, alloc_status_32;
	u8 unused[6];
};

// The tables that the processes of all control groups share. Each group has at most a share of one, so that none can take what others need.
enum table { TABLE_HOLDERS, TABLE_THREADS, TABLE_CALLS, TABLE_ERRORS, TABLE_OPENS, TABLES };
const enum table *unused_table __attribute__((unused));
volatile const u32 shares[TABLES] = {2048, 2048, 256, 128, 64};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct status_rules);
} rules SEC(".maps");

// Majors are 12 bits wide. An array: this is looked up for every ioctl and open of the host.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} majors SEC(".maps");

// Devices that are traced alone, where their major's rule is RULE_MINORS.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, u32);
	__type(value, u32);
} minors SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} events SEC(".maps");

#define HOLDER_OPENED 1 // it opened a device itself, so it is one of the processes started
#define HOLDER_SHARED 2 // it counts in its group's share

struct holder {
	u64 group, window;
	u32 opens, calls; // records in this window
	u64 suppressed, dropped; // opens and calls without a record
	u32 flags, unused;
};

// Processes that have, or had, a device.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct holder);
} holders SEC(".maps");

struct thread {
	u64 entry; // of the call under way; 0: none
	u64 arg, file, seq;
	u64 group; // whose share it counts in
	u32 cmd, node, minor;
	u32 known; // its process is a holder
	u32 opening, opening_minor; // a node by its name, between entry and exit of an open
	u8 in[IN];
};

// Threads that called a device, kept until they end: so a call costs two lookups and no change of the table.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct thread);
} threads SEC(".maps");

struct call_key {
	u64 group;
	u32 node, nr;
};

#define BUCKETS 32

struct call_count {
	u64 count, ns, buckets[BUCKETS];
};

// Shared by all CPUs and added to atomically: CUDA makes some hundred calls at its start and none at work, while a copy for each of 128
// CPUs would take 40 KB an entry.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct call_key);
	__type(value, struct call_count);
} calls SEC(".maps");

struct error_key {
	u64 group;
	u32 node, nr;
	s32 status; // NV_STATUS, or a negative errno
	u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct error_key);
	__type(value, u64);
} errors SEC(".maps");

struct open_key {
	u64 group;
	u32 node;
	s32 result;
};

struct open_count {
	u64 count, window, events;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct open_key);
	__type(value, struct open_count);
} opens SEC(".maps");

struct group_count {
	u64 started, exited, failed, killed;
	u64 lost; // records of its processes that its share did not take: none of them is exact then
	u64 dropped; // the sum of its processes', those that are gone too
	u64 window;
	u32 records; // in this window
	u32 used[TABLES]; // entries that it has
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u64);
	__type(value, struct group_count);
} groups SEC(".maps");

#define SECOND 1000000000ull

static __always_inline struct task_struct *current_task(void)
{
	return (void *)bpf_get_current_task();
}

// current_css returns the state of the controller of version 1 that tells containers apart.
static __always_inline struct cgroup_subsys_state *current_css(void)
{
	struct css_set *set = BPF_CORE_READ(current_task(), cgroups);
	struct cgroup_subsys_state *css = 0;

	bpf_probe_read_kernel(&css, sizeof(css), (void *)set + bpf_core_field_offset(struct css_set, subsys) + sizeof(css) * cgroup_at);
	return css;
}

static __always_inline u64 current_group(void)
{
	struct cgroup_subsys_state *css;

	if (!cgroup_v1)
		return bpf_get_current_cgroup_id();
	if (have_task_btf && !cgroup_at)
		return bpf_get_current_task_btf()->cgroups->subsys[0]->cgroup->kn->id;
	css = current_css();
	return BPF_CORE_READ(css, cgroup, kn, id);
}

static __always_inline u32 node_of(u32 rdev)
{
	u32 major = rdev >> 20, minor = rdev & 0xfffff;
	u32 *rule = bpf_map_lookup_elem(&majors, &major);

	if (!rule)
		return NODE_NONE;
	switch (*rule) {
	case RULE_RM:
		return minor == 255 ? NODE_CTL : minor < 248 ? NODE_GPU : NODE_NONE; // 254 is modeset
	case RULE_MINORS:
		rule = bpf_map_lookup_elem(&minors, &rdev);
		return rule ? *rule : NODE_NONE;
	}
	return *rule;
}

static __always_inline struct file *file_of(u32 fd)
{
	struct file **files, *file = 0;
	struct fdtable *table;

	if (have_task_btf) {
		table = bpf_get_current_task_btf()->files->fdt;
		if (fd >= table->max_fds)
			return 0;
		files = table->fd;
	} else {
		table = BPF_CORE_READ(current_task(), files, fdt);
		if (fd >= BPF_CORE_READ(table, max_fds))
			return 0;
		files = BPF_CORE_READ(table, fd);
	}
	bpf_probe_read_kernel(&file, sizeof(file), &files[fd]);
	return file;
}

static __always_inline u32 rdev_of(struct file *file)
{
	return BPF_CORE_READ(file, f_inode, i_rdev);
}

static __always_inline void fill(struct header *h, u32 kind, u32 node, u64 group)
{
	struct task_struct *leader = BPF_CORE_READ(current_task(), group_leader);
	u64 id = bpf_get_current_pid_tgid();

	h->time = bpf_ktime_get_ns();
	h->start = BPF_CORE_READ(leader, start_boottime);
	h->group = group;
	h->tgid = id >> 32;
	h->tid = id;
	h->kind = kind;
	h->node = node;
	__builtin_memset(h->comm, 0, sizeof(h->comm));
	bpf_probe_read_kernel_str(h->comm, sizeof(h->comm), &leader->comm);
}

static __always_inline struct group_count *group_of(u64 group)
{
	struct group_count *g = bpf_map_lookup_elem(&groups, &group), fresh = {};

	if (g)
		return g;
	bpf_map_update_elem(&groups, &group, &fresh, BPF_NOEXIST);
	g = bpf_map_lookup_elem(&groups, &group);
	if (!g)
		count_lost_by(LOST_GROUPS);
	return g;
}

// room takes one entry of a group's share, and tells whether there was one. A group that is not known, there being too many, has no bound.
static __always_inline bool room(struct group_count *g, enum table table)
{
	if (!g)
		return true;
	if (g->used[table] >= shares[table])
		return false;
	__sync_fetch_and_add(&g->used[table], 1);
	return true;
}

static __always_inline void give_back(struct group_count *g, enum table table)
{
	if (g && g->used[table])
		__sync_fetch_and_add(&g->used[table], -1);
}

// lost_share counts what a group's share did not take, and last for all: who sees that count looks for the group.
static __always_inline void lost_share(struct group_count *g)
{
	if (g)
		__sync_fetch_and_add(&g->lost, 1);
	count_lost_by(LOST_SHARE);
}

// reserve makes room for a record of a process in a group; 0: it is lost. Of the ring buffer a group has its share by the second.
static __always_inline void *reserve(u64 group, u64 size)
{
	struct group_count *g = bpf_map_lookup_elem(&groups, &group);
	u64 now;
	void *e;

	if (g) {
		now = bpf_ktime_get_ns();
		if (now - g->window >= SECOND) {
			g->window = now;
			g->records = 0;
		}
		if (g->records >= group_rate) {
			lost_share(g);
			return 0;
		}
		__sync_fetch_and_add(&g->records, 1);
	}
	e = bpf_ringbuf_reserve(&events, size, 0);
	if (!e)
		count_lost_by(LOST_RING);
	return e;
}

static __always_inline void roll(struct holder *h, u64 now)
{
	if (now - h->window < SECOND)
		return;
	h->window = now;
	h->opens = 0;
	h->calls = 0;
}

// hold makes a process a holder, and counts it as started when it opened a device itself.
static __always_inline struct holder *hold(u32 tgid, u64 group, bool opened, bool *first)
{
	struct holder *h = bpf_map_lookup_elem(&holders, &tgid), fresh = {.group = group};
	struct group_count *g;

	if (!h) {
		g = group_of(group);
		if (!room(g, TABLE_HOLDERS)) {
			lost_share(g);
			return 0;
		}
		fresh.flags = g ? HOLDER_SHARED : 0;
		*first = !bpf_map_update_elem(&holders, &tgid, &fresh, BPF_NOEXIST);
		if (!*first)
			give_back(g, TABLE_HOLDERS);
		h = bpf_map_lookup_elem(&holders, &tgid);
		if (!h) {
			count_lost_by(LOST_HOLDERS);
			return 0;
		}
	}
	if (opened && !(h->flags & HOLDER_OPENED)) {
		h->flags |= HOLDER_OPENED;
		g = group_of(group);
		if (h->group != group) { // it was forked in another
			if (h->flags & HOLDER_SHARED)
				give_back(bpf_map_lookup_elem(&groups, &h->group), TABLE_HOLDERS);
			h->flags &= ~HOLDER_SHARED;
			if (g && room(g, TABLE_HOLDERS))
				h->flags |= HOLDER_SHARED;
			h->group = group;
		}
		if (g)
			__sync_fetch_and_add(&g->started, 1);
	}
	return h;
}

static __always_inline void send_open(u32 kind, struct file *file, u32 node, u32 minor, s32 result, u64 group, bool first)
{
	struct open_event *e = reserve(group, sizeof(*e));
	struct cgroup_subsys_state *css;
	const char *name;

	if (!e)
		return;
	fill(&e->h, kind, node, group);
	e->file = (u64)file;
	e->minor = minor;
	e->result = result;
	e->first = first;
	e->unused = 0;
	if (cgroup_v1) {
		css = current_css();
		name = BPF_CORE_READ(css, cgroup, kn, name);
	} else {
		name = BPF_CORE_READ(current_task(), cgroups, dfl_cgrp, kn, name);
	}
	if (bpf_probe_read_kernel_str(e->cgroup, sizeof(e->cgroup), name) < 0)
		e->cgroup[0] = 0;
	bpf_ringbuf_submit(e, 0);
}

// What is beyond a group's share is counted together: results that nothing has, and calls under NR_OTHER.
#define RESULT_OTHER -4095
#define STATUS_OTHER 0x7fffffff

// opened books an open of a device, with its result: 0 or a negative errno.
static __always_inline void opened(struct file *file, u32 node, u32 minor, s32 result)
{
	u64 group = current_group(), now = bpf_ktime_get_ns();
	struct open_key key = {.group = group, .node = node, .result = result};
	struct open_count *o = bpf_map_lookup_elem(&opens, &key), fresh = {};
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct holder *h;
	bool first = false;

	if (!o) {
		struct group_count *g = group_of(group);

		if (result && !room(g, TABLE_OPENS)) {
			key.result = RESULT_OTHER;
			bpf_map_update_elem(&opens, &key, &fresh, BPF_NOEXIST);
		} else if (bpf_map_update_elem(&opens, &key, &fresh, BPF_NOEXIST) && result) {
			give_back(g, TABLE_OPENS);
		}
		o = bpf_map_lookup_elem(&opens, &key);
	}
	if (o)
		__sync_fetch_and_add(&o->count, 1);
	else
		count_lost_by(LOST_OPENS);
	if (result) {
		// Failed opens tell nothing about who holds what: a few a second are enough.
		if (!o)
			return;
		if (now - o->window >= SECOND) {
			o->window = now;
			o->events = 0;
		}
		if (o->events >= 64)
			return;
		__sync_fetch_and_add(&o->events, 1);
	} else {
		h = hold(tgid, group, true, &first);
		if (h && !first) {
			roll(h, now);
			if (h->opens >= open_rate) {
				__sync_fetch_and_add(&h->suppressed, 1);
				return;
			}
			h->opens++;
		}
	}
	send_open(KIND_OPEN, file, node, minor, result, group, first);
}

// by_name tells what node a name means, for an open that failed.
static __always_inline u32 by_name(const char *name, u32 *minor)
{
	u32 i, at = prefix_len;
	char c;

	for (i = 0; i < PREFIX; i++) {
		if (i >= at)
			break;
		if (name[i] != prefix[i])
			return NODE_NONE;
	}
	if (at > PREFIX - 1)
		return NODE_NONE;
	c = name[at];
	if (c == 'c')
		return NODE_CTL;
	if (c >= '0' && c <= '9') {
		for (i = 0; i < 3 && name[at + i] >= '0' && name[at + i] <= '9'; i++)
			*minor = *minor * 10 + name[at + i] - '0';
		return NODE_GPU;
	}
	if (c == '-')
		return name[at + 1] == 'u' ? NODE_UVM : name[at + 1] == 'c' ? NODE_CAPS : NODE_NONE;
	return NODE_NONE;
}

static __always_inline struct thread *thread_of(u32 tid)
{
	struct thread *t = bpf_map_lookup_elem(&threads, &tid), fresh = {};
	struct group_count *g;

	if (t)
		return t;
	fresh.group = current_group();
	g = group_of(fresh.group);
	if (!room(g, TABLE_THREADS)) {
		lost_share(g);
		return 0;
	}
	if (!g)
		fresh.group = 0;
	if (bpf_map_update_elem(&threads, &tid, &fresh, BPF_NOEXIST))
		give_back(g, TABLE_THREADS);
	t = bpf_map_lookup_elem(&threads, &tid);
	if (!t)
		count_lost_by(LOST_THREADS);
	return t;
}

static __always_inline void forget_thread(u32 tid)
{
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	u64 group;

	if (!t)
		return;
	group = t->group;
	if (!bpf_map_delete_elem(&threads, &tid))
		give_back(bpf_map_lookup_elem(&groups, &group), TABLE_THREADS);
}

static __always_inline int open_enter(u64 path)
{
	char name[PREFIX + 8] = {};
	u32 minor = 0, node;
	struct thread *t;

	bpf_probe_read_user_str(name, PREFIX + 4, (void *)path);
	node = by_name(name, &minor);
	if (!node)
		return 0;
	t = thread_of(bpf_get_current_pid_tgid());
	if (t) {
		t->opening = node;
		t->opening_minor = minor;
	}
	return 0;
}

static __always_inline int open_exit(s64 ret)
{
	u32 tid = bpf_get_current_pid_tgid(), opening = 0, minor = 0, node, rdev;
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	struct file *file;

	if (t) {
		opening = t->opening;
		minor = t->opening_minor;
		t->opening = 0;
	}
	if (ret < 0) {
		if (opening)
			opened(0, opening, minor, ret);
		return 0;
	}
	file = file_of(ret);
	rdev = rdev_of(file);
	node = node_of(rdev);
	if (node)
		opened(file, node, rdev & 0xfffff, 0);
	return 0;
}

// Numbers of the driver's calls: the low byte of RM's commands; UVM's commands are numbers themselves.
#define RM_FREE 0x29
#define RM_CONTROL 0x2a
#define RM_ALLOC 0x2b
#define RM_DUP 0x34
#define RM_VID_HEAP 0x4a
#define RM_XFER 0xd3
#define UVM_REGISTER_VASPACE 25
#define UVM_REGISTER_GPU 37
#define UVM_INITIALIZE 0x30000001
#define NR_INITIALIZE 256
#define NR_DEINITIALIZE 257
#define NR_OTHER 511

static __always_inline int call_enter(struct file *file, u32 cmd, u64 arg)
{
	u32 rdev = rdev_of(file), node = node_of(rdev);
	struct thread *t;
	bool first = false;
	u64 id;

	if (!node)
		return 0;
	id = bpf_get_current_pid_tgid();
	t = thread_of(id);
	if (!t)
		return 0;
	if (!t->known) {
		u64 group = current_group();

		// A descriptor that came by fork is known; one that another process passed on is seen here first.
		hold(id >> 32, group, false, &first);
		if (first)
			send_open(KIND_USE, file, node, rdev & 0xfffff, 0, group, true);
		t->known = 1;
	}
	t->arg = arg;
	t->file = (u64)file;
	t->cmd = cmd;
	t->node = node;
	t->minor = rdev & 0xfffff;
	t->seq++;
	if (node == NODE_UVM) // REGISTER_GPU overwrites the UUID that it is given
		bpf_probe_read_user(t->in, IN, (void *)arg);
	else if (node < NODE_UVM && (cmd & 0xff) == RM_ALLOC) // what must still be the same at exit, see wanted
		bpf_probe_read_user(t->in, IN, (void *)(arg + 8));
	t->entry = bpf_ktime_get_ns();
	return 0;
}

static __always_inline u32 log2(u64 v)
{
	u32 r = 0;

	if (v >= 1ull << 32)
		return BUCKETS - 1;
	if (v >= 1 << 16) {
		v >>= 16;
		r += 16;
	}
	if (v >= 1 << 8) {
		v >>= 8;
		r += 8;
	}
	if (v >= 1 << 4) {
		v >>= 4;
		r += 4;
	}
	if (v >= 1 << 2) {
		v >>= 2;
		r += 2;
	}
	if (v >= 2)
		r += 1;
	return r;
}

static __always_inline u32 number(u32 node, u32 cmd)
{
	if (node != NODE_UVM)
		return cmd & 0xff;
	if (cmd < 256)
		return cmd;
	return cmd - UVM_INITIALIZE < 2 ? NR_INITIALIZE + cmd - UVM_INITIALIZE : NR_OTHER;
}

// status_at returns the offset of a call's status word plus one, or 0.
static __always_inline u32 status_at(struct status_rules *s, u32 node, u32 cmd, u32 nr)
{
	u32 size = cmd >> 16 & 0x3fff;

	if (node == NODE_UVM)
		return nr == NR_INITIALIZE ? 9 : nr < 128 ? s->uvm_status[nr] : 0;
	if (node > NODE_UVM)
		return 0;
	if (nr == RM_ALLOC)
		return size == 48 ? s->rm_status[RM_ALLOC] : size == 40 ? s->alloc_status_40 : size == 32 ? s->alloc_status_32 : 0;
	return s->rm_status[nr & 0xff];
}

// routine tells statuses that the driver's own libraries provoke when they ask what a GPU can do.
static __always_inline bool routine(u32 status)
{
	return status >> 16 == 1 || status == 0x22 || status == 0x24 || status == 0x56 || status == 0x57;
}

// wanted tells whether a call says something about contexts or memory.
static __always_inline bool wanted(struct thread *t, u32 nr)
{
	u32 word = 0, made[IN / 4] = {}, *in = (u32 *)t->in, node = t->node;
	u64 arg = t->arg;

	if (node == NODE_UVM)
		return nr == UVM_REGISTER_GPU || nr == UVM_REGISTER_VASPACE;
	if (node > NODE_UVM)
		return false;
	switch (nr) {
	case RM_FREE:
	case RM_DUP:
	case RM_VID_HEAP:
	case RM_XFER:
		return true;
	case RM_CONTROL:
		bpf_probe_read_user(&word, sizeof(word), (void *)(arg + 8));
		return word == 0x202 || word == 0x205;
	case RM_ALLOC:
		// The handle, the class and the address of the parameters.
		if (bpf_probe_read_user(made, sizeof(made), (void *)(arg + 8)))
			return true; // not readable: the ledger must know that it missed something
		if ((made[1] != in[1] && !(in[1] <= 1 && made[1] == 0x41)) || made[2] != in[2] || made[3] != in[3])
			return true; // exchanged meanwhile, and not by the driver, which only makes a root client of class 0x41: likewise
		switch (made[1]) {
		case 0:
		case 1:
		case 0x41:
		case 0x40:
		case 0x80:
		case 0x2080:
		case 0x90f1:
			return true;
		}
		return (made[1] & 0xff) == 0x6f; // a channel
	}
	return false;
}

static __always_inline void send_call(struct thread *t, u32 nr, s64 ret, u64 group, struct holder *h)
{
	struct call_event *e;
	struct group_count *g;
	u64 params = 0;

	if (h) {
		roll(h, bpf_ktime_get_ns());
		if (h->calls >= call_rate) {
			__sync_fetch_and_add(&h->dropped, 1);
			g = bpf_map_lookup_elem(&groups, &h->group);
			if (g)
				__sync_fetch_and_add(&g->dropped, 1);
			count_lost_by(LOST_RATE); // last: who sees it looks for the process, and for its group if it is gone
			return;
		}
		h->calls++;
	}
	e = reserve(group, sizeof(*e));
	if (!e)
		return;
	fill(&e->h, KIND_CALL, t->node, group);
	e->entry = t->entry;
	e->seq = t->seq;
	e->file = t->file;
	e->ret = ret;
	e->cmd = t->cmd;
	e->unused = 0;
	__builtin_memcpy(e->in, t->in, IN);
	// A block may end where its page does: then as much as a shorter read gives. What was not read stays zero.
	e->out_len = OUT;
	if (bpf_probe_read_user(e->out, OUT, (void *)t->arg)) {
		__builtin_memset(e->out, 0, OUT);
		e->out_len = 184;
		if (nr != RM_VID_HEAP || bpf_probe_read_user(e->out, 184, (void *)t->arg)) {
			e->out_len = 48;
			if (bpf_probe_read_user(e->out, 48, (void *)t->arg)) {
				e->out_len = 28;
				if (bpf_probe_read_user(e->out, 28, (void *)t->arg)) {
					e->out_len = 16;
					if (bpf_probe_read_user(e->out, 16, (void *)t->arg))
						e->out_len = 0;
				}
			}
		}
	}
	__builtin_memset(e->deep, 0, DEEP);
	e->deep_len = 0;
	if (nr == RM_ALLOC || nr == RM_CONTROL) { // these carry a pointer to parameters of their own at offset 16
		__builtin_memcpy(&params, e->out + 16, sizeof(params));
		if (params) {
			e->deep_len = DEEP;
			if (bpf_probe_read_user(e->deep, DEEP, (void *)params)) {
				e->deep_len = 72;
				if (bpf_probe_read_user(e->deep, 72, (void *)params)) {
					e->deep_len = 12;
					if (bpf_probe_read_user(e->deep, 12, (void *)params))
						e->deep_len = 0;
				}
			}
		}
	}
	bpf_ringbuf_submit(e, 0);
}

static __always_inline int call_exit(s64 ret)
{
	u64 id = bpf_get_current_pid_tgid(), group, ns;
	u32 tid = id, tgid = id >> 32, zero = 0, at, status = 0;
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	struct call_count *c, fresh = {};
	struct call_key key = {}, counted = {};
	struct status_rules *s;
	struct group_count *g;

	if (!t || !t->entry)
		return 0;
	ns = bpf_ktime_get_ns() - t->entry;
	group = current_group();
	key.group = group;
	key.node = t->node;
	key.nr = number(t->node, t->cmd);
	counted = key;
	c = bpf_map_lookup_elem(&calls, &key);
	if (!c) {
		g = group_of(group);
		if (!room(g, TABLE_CALLS)) {
			counted.nr = NR_OTHER;
			bpf_map_update_elem(&calls, &counted, &fresh, BPF_NOEXIST);
		} else if (bpf_map_update_elem(&calls, &key, &fresh, BPF_NOEXIST)) {
			give_back(g, TABLE_CALLS);
		}
		c = bpf_map_lookup_elem(&calls, &counted);
	}
	if (c) {
		u32 bucket = log2(ns);

		__sync_fetch_and_add(&c->count, 1);
		__sync_fetch_and_add(&c->ns, ns);
		if (bucket < BUCKETS)
			__sync_fetch_and_add(&c->buckets[bucket], 1);
	} else {
		count_lost_by(LOST_CALLS);
	}
	if (ret < 0) {
		status = ret;
	} else {
		s = bpf_map_lookup_elem(&rules, &zero);
		at = s ? status_at(s, t->node, t->cmd, key.nr) : 0;
		if (at && bpf_probe_read_user(&status, sizeof(status), (void *)(t->arg + at - 1)))
			status = 0;
		if (wanted(t, key.nr))
			send_call(t, key.nr, ret, group, bpf_map_lookup_elem(&holders, &tgid));
	}
	if (status && !routine(status)) {
		struct error_key failed = {.group = group, .node = key.node, .nr = counted.nr, .status = status};
		u64 *n = bpf_map_lookup_elem(&errors, &failed), none = 0;

		if (!n) {
			g = group_of(group);
			if (!room(g, TABLE_ERRORS)) {
				failed.status = STATUS_OTHER; // of so many calls as the group has in the table of calls
				bpf_map_update_elem(&errors, &failed, &none, BPF_NOEXIST);
			} else if (bpf_map_update_elem(&errors, &failed, &none, BPF_NOEXIST)) {
				give_back(g, TABLE_ERRORS);
			}
			n = bpf_map_lookup_elem(&errors, &failed);
		}
		if (n)
			__sync_fetch_and_add(n, 1);
		else
			count_lost_by(LOST_ERRORS);
	}
	t->entry = 0;
	return 0;
}

// closing tells that a process which holds devices closes one of them. What it still holds is then looked up in /proc.
static __always_inline int closing(struct file *file, struct holder *h)
{
	struct end_event *e;
	u32 node = node_of(rdev_of(file));
	u64 now;

	if (!node)
		return 0;
	now = bpf_ktime_get_ns();
	roll(h, now);
	if (h->opens >= open_rate) {
		__sync_fetch_and_add(&h->suppressed, 1);
		return 0;
	}
	h->opens++;
	e = reserve(h->group, sizeof(*e));
	if (!e)
		return 0;
	fill(&e->h, KIND_CLOSE, node, h->group);
	e->code = 0;
	e->child = 0;
	e->child_start = 0;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

SEC("tracepoint/syscalls/sys_enter_ioctl")
int tp_ioctl_enter(struct syscall_enter *ctx)
{
	struct file *file = file_of(ctx->args[0]);

	return file ? call_enter(file, ctx->args[1], ctx->args[2]) : 0;
}

SEC("tracepoint/syscalls/sys_exit_ioctl")
int tp_ioctl_exit(struct syscall_exit *ctx)
{
	return call_exit(ctx->ret);
}

// open and creat.
SEC("tracepoint/syscalls/sys_enter_open")
int tp_open_enter(struct syscall_enter *ctx)
{
	return open_enter(ctx->args[0]);
}

// openat and openat2.
SEC("tracepoint/syscalls/sys_enter_openat")
int tp_openat_enter(struct syscall_enter *ctx)
{
	return open_enter(ctx->args[1]);
}

SEC("tracepoint/syscalls/sys_exit_openat")
int tp_open_exit(struct syscall_exit *ctx)
{
	return open_exit(ctx->ret);
}

SEC("tracepoint/syscalls/sys_enter_close")
int tp_close(struct syscall_enter *ctx)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct holder *h = bpf_map_lookup_elem(&holders, &tgid);
	struct file *file;

	if (!h)
		return 0;
	file = file_of(ctx->args[0]);
	return file ? closing(file, h) : 0;
}

// security_file_ioctl(file, cmd, arg)
SEC("fentry/security_file_ioctl")
int fe_ioctl_enter(u64 *ctx)
{
	return call_enter((struct file *)ctx[0], ctx[1], ctx[2]);
}

// The system call's function takes the registers; its result follows. The name is that of this machine's architecture.
SEC("fexit/__x64_sys_ioctl")
int fe_ioctl_exit(u64 *ctx)
{
	return call_exit(ctx[1]);
}

// The same for 32-bit programs on a 64-bit kernel, whose parameters are the same. From 6.8 on, and in its elders since, a hook of its own is called.
SEC("fentry/security_file_ioctl_compat")
int fe_compat_enter(u64 *ctx)
{
	return call_enter((struct file *)ctx[0], ctx[1], ctx[2]);
}

SEC("fexit/__ia32_compat_sys_ioctl")
int fe_compat_exit(u64 *ctx)
{
	return call_exit(ctx[1]);
}

// do_filp_open(dfd, filename, flags) returns a file or an error: every way to open comes through here.
SEC("fexit/do_filp_open")
int fe_open(u64 *ctx)
{
	struct filename *filename = (struct filename *)ctx[1];
	char name[PREFIX + 8] = {};
	u32 minor = 0, node, rdev;
	s64 ret = ctx[3];

	if (ret < 0 && ret >= -4095) {
		bpf_probe_read_kernel(&ret, sizeof(ret), &ctx[3]); // to the verifier it was a pointer, which may not be cut to an int
		bpf_probe_read_kernel_str(name, PREFIX + 4, BPF_CORE_READ(filename, name));
		node = by_name(name, &minor);
		if (node)
			opened(0, node, minor, ret);
		return 0;
	}
	rdev = rdev_of((struct file *)ret);
	node = node_of(rdev);
	if (node)
		opened((struct file *)ret, node, rdev & 0xfffff, 0);
	return 0;
}

// filp_flush(file, id) from 6.6, filp_close(file, id) before.
SEC("fentry/filp_close")
int fe_close(u64 *ctx)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct holder *h = bpf_map_lookup_elem(&holders, &tgid);

	return h ? closing((struct file *)ctx[0], h) : 0;
}

// sched_process_fork(parent, child)
SEC("raw_tp/sched_process_fork")
int on_fork(u64 *ctx)
{
	struct task_struct *child = (struct task_struct *)ctx[1];
	u32 parent = bpf_get_current_pid_tgid() >> 32, tgid;
	struct end_event *e;
	struct holder *h;
	bool first = false;

	h = bpf_map_lookup_elem(&holders, &parent);
	if (!h)
		return 0;
	tgid = BPF_CORE_READ(child, tgid);
	if (tgid == parent)
		return 0; // a thread
	hold(tgid, h->group, false, &first);
	e = reserve(h->group, sizeof(*e));
	if (!e)
		return 0;
	fill(&e->h, KIND_FORK, 0, h->group);
	e->code = 0;
	e->child = tgid;
	e->child_start = BPF_CORE_READ(child, start_boottime);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

// sched_process_exec(task, old_pid, bprm)
SEC("raw_tp/sched_process_exec")
int on_exec(u64 *ctx)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32, old = ctx[1];
	struct holder *h = bpf_map_lookup_elem(&holders, &tgid);
	struct end_event *e;

	if (!h)
		return 0;
	if (old != tgid) // another thread than the first: it is the first now
		forget_thread(old);
	e = reserve(h->group, sizeof(*e));
	if (!e)
		return 0;
	fill(&e->h, KIND_EXEC, 0, h->group);
	e->code = 0;
	e->child = 0;
	e->child_start = 0;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

#define SIGNAL_GROUP_EXIT 4

// sched_process_exit(task): every thread. The count of living threads is already one less.
SEC("raw_tp/sched_process_exit")
int on_exit(u64 *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), group;
	u32 tid = id, tgid = id >> 32, code, flags;
	struct task_struct *leader;
	struct signal_struct *signal;
	struct group_count *g;
	struct end_event *e;
	struct holder *h;

	forget_thread(tid);
	h = bpf_map_lookup_elem(&holders, &tgid);
	if (!h)
		return 0;
	leader = BPF_CORE_READ(current_task(), group_leader);
	signal = BPF_CORE_READ(leader, signal);
	if (BPF_CORE_READ(signal, live.counter) > 0)
		return 0;
	code = BPF_CORE_READ(signal, flags) & SIGNAL_GROUP_EXIT ? BPF_CORE_READ(signal, group_exit_code) : BPF_CORE_READ(leader, exit_code);
	group = h->group;
	flags = h->flags;
	if (bpf_map_delete_elem(&holders, &tgid))
		return 0;
	g = group_of(group);
	if (g && flags & HOLDER_OPENED)
		__sync_fetch_and_add(code & 0x7f ? &g->killed : code ? &g->failed : &g->exited, 1);
	if (flags & HOLDER_SHARED)
		give_back(g, TABLE_HOLDERS);
	e = reserve(group, sizeof(*e));
	if (!e)
		return 0;
	fill(&e->h, KIND_EXIT, 0, group);
	e->code = code;
	e->child = 0;
	e->child_start = 0;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

// The driver's report of an error: the GPU's PCI address, the Xid and a line of text.
SEC("tracepoint/nvidia/nvidia_dev_xid")
int on_xid(void *ctx)
{
	struct xid_event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	u32 at = 0, code = 0;

	if (!e) {
		count_lost_by(LOST_RING);
		return 0;
	}
	fill(&e->h, KIND_XID, 0, 0);
	e->code = 0;
	e->dev[0] = 0;
	e->msg[0] = 0;
	if (xid_code_size == 4) {
		bpf_probe_read_kernel(&code, sizeof(code), ctx + xid_code_at);
		e->code = code;
	} else {
		bpf_probe_read_kernel(&e->code, sizeof(e->code), ctx + xid_code_at);
	}
	// Strings lie behind the record; their place is the low half of a word in it.
	bpf_probe_read_kernel(&at, sizeof(at), ctx + xid_dev_at);
	if (bpf_probe_read_kernel_str(e->dev, sizeof(e->dev), ctx + (at & 0xffff)) < 0)
		e->dev[0] = 0;
	bpf_probe_read_kernel(&at, sizeof(at), ctx + xid_msg_at);
	if (bpf_probe_read_kernel_str(e->msg, sizeof(e->msg), ctx + (at & 0xffff)) < 0)
		e->msg[0] = 0;
	bpf_ringbuf_submit(e, 0);
	return 0;
}
