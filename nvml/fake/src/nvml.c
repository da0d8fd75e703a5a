// A library with the binary interface of NVIDIA's libnvidia-ml.so.1 and no GPU behind it. It answers what a scenario file says; the
// format is described in the Go package beside this directory. Every call looks whether the file has changed, so that a test can
// change the host under a running program. All functions may be called from several threads.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef FAKE_REAL_HEADER
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include FAKE_REAL_HEADER
#else
#include "abi.h"
#endif

#define FN __attribute__((visibility("default"))) nvmlReturn_t

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 9, TIMEOUT, GPU_IS_LOST = 15,
	ARGUMENT_VERSION = 25 };
enum { MAXGPU = 32, MAXMIG = 16, MAXARGS = 12, SLOT_US = 200000, POWER_US = 20000 };

// line is one line of the scenario: words, and the text after the first word as it was written.
struct line {
	char *word[MAXARGS], *rest;
	int words;
};

struct section {
	struct line *lines;
	int n, cap;
};

struct fault {
	struct line l; // fault FUNCTION DEVICE KIND ARGUMENT TIMES
	long left;     // -1: for ever
};

static struct scenario {
	char *text, *whole; // cut into words, and as it was
	struct section system, gpu[MAXGPU], mig[MAXGPU][MAXMIG];
	struct fault faults[256];
	int gpus, migs[MAXGPU], nfaults;
} sc;

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static char scenario_path[4096];
static struct stat seen;
static int initialized, log_fd = -1;
static char log_path[4096];

// A device handle points into this table, so it stays valid over reloads and a wrong one is told apart.
static struct nvmlDevice_st {
	int gpu, mig;
} handles[MAXGPU][MAXMIG + 1];

struct nvmlEventSet_st {
	unsigned long long mask[MAXGPU];
	int delivered[MAXGPU];
};

struct nvmlGpmSample_st {
	int gpu;
	uint64_t us;
};

static uint64_t clock_us(clockid_t id)
{
	struct timespec t;
	clock_gettime(id, &t);
	return (uint64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static uint64_t now_us(void) { return clock_us(CLOCK_REALTIME); }

static double uptime(void) { return clock_us(CLOCK_BOOTTIME) / 1e6; }

static void sleep_ms(long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};
	while (nanosleep(&t, &t) != 0)
		;
}

// ---- the scenario file ----

static void add(struct section *s, struct line l)
{
	if (s->n == s->cap) {
		s->cap = s->cap ? 2 * s->cap : 64;
		s->lines = realloc(s->lines, s->cap * sizeof *s->lines);
	}
	s->lines[s->n++] = l;
}

static void drop(struct section *s)
{
	free(s->lines);
	memset(s, 0, sizeof *s);
}

static void parse(char *text)
{
	drop(&sc.system);
	for (int i = 0; i < MAXGPU; i++) {
		drop(&sc.gpu[i]);
		for (int j = 0; j < MAXMIG; j++)
			drop(&sc.mig[i][j]);
		sc.migs[i] = 0;
	}
	free(sc.text);
	free(sc.whole);
	sc.text = text;
	sc.whole = strdup(text);
	for (char *p = sc.whole; (p = strchr(p, '\n')); p++)
		*p = 0;
	sc.gpus = sc.nfaults = 0;
	struct section *s = &sc.system;
	for (char *save, *t = strtok_r(text, "\n", &save); t; t = strtok_r(NULL, "\n", &save)) {
		t += strspn(t, " \t");
		if (!*t || *t == '#')
			continue;
		struct line l = {0};
		char *sp = strpbrk(t, " \t");
		l.rest = sp ? sc.whole + (sp + 1 + strspn(sp + 1, " \t") - text) : "";
		for (char *ws, *w = strtok_r(t, " \t", &ws); w && l.words < MAXARGS; w = strtok_r(NULL, " \t", &ws))
			l.word[l.words++] = w;
		if (!strcmp(l.word[0], "gpu") && sc.gpus < MAXGPU) {
			s = &sc.gpu[sc.gpus++];
		} else if (!strcmp(l.word[0], "mig") && sc.gpus > 0 && sc.migs[sc.gpus - 1] < MAXMIG) {
			s = &sc.mig[sc.gpus - 1][sc.migs[sc.gpus - 1]++];
		} else if (!strcmp(l.word[0], "fault") && l.words >= 4 && sc.nfaults < 256) {
			struct fault *f = &sc.faults[sc.nfaults++];
			f->l = l;
			f->left = l.words > 5 ? atol(l.word[5]) : -1;
		} else {
			add(s, l);
		}
	}
}

// locate finds the scenario: a file beside this very library wins, so that several copies in one process have their own.
static void locate(void)
{
	if (scenario_path[0])
		return;
	Dl_info info;
	if (dladdr((void *)&locate, &info) && info.dli_fname) {
		snprintf(scenario_path, sizeof scenario_path, "%s.scenario", info.dli_fname);
		if (access(scenario_path, R_OK) == 0)
			return;
	}
	const char *e = getenv("FAKE_NVML_SCENARIO");
	snprintf(scenario_path, sizeof scenario_path, "%s", e ? e : "");
}

static struct line *find(struct section *s, const char *key)
{
	for (int i = 0; i < s->n; i++)
		if (!strcmp(s->lines[i].word[0], key))
			return &s->lines[i];
	return NULL;
}

// reload reads the scenario if it has changed. The caller holds mu.
static void reload(void)
{
	struct stat st;
	locate();
	if (!scenario_path[0] || stat(scenario_path, &st) != 0)
		return;
	if (st.st_ino == seen.st_ino && st.st_size == seen.st_size && st.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
	    st.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
		return;
	int fd = open(scenario_path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	char *text = malloc(st.st_size + 1);
	ssize_t n = read(fd, text, st.st_size);
	close(fd);
	if (n < 0) {
		free(text);
		return;
	}
	text[n] = 0;
	seen = st;
	for (int i = 0; i < MAXGPU; i++)
		for (int j = 0; j <= MAXMIG; j++)
			handles[i][j] = (struct nvmlDevice_st){i, j - 1};
	parse(text);
	struct line *l = find(&sc.system, "log");
	const char *path = l ? l->rest : "";
	if (strcmp(path, log_path)) {
		if (log_fd >= 0)
			close(log_fd);
		snprintf(log_path, sizeof log_path, "%s", path);
		log_fd = *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
	}
}

// ---- one call ----

// ctx is one call under way: the section that answers it, and the fault that applies. It holds mu until it goes out of scope.
struct ctx {
	long long ret; // what to return at once, or -1
	int gpu, mig;
	struct section *s;
	const char *kind; // of a fault that the function itself carries out: fill, count, insufficient
	uint64_t arg;
};

static uint64_t number(const char *w)
{
	if (!w)
		return 0;
	if (strncmp(w, "0x", 2) && strpbrk(w, ".eEn")) {
		double d = strtod(w, NULL);
		return d > 0 ? (uint64_t)d : 0;
	}
	return strtoull(w, NULL, 0); // "-1" becomes all bits set
}

static struct fault *fault_for(const char *fn, int gpu)
{
	char index[16];
	snprintf(index, sizeof index, "%d", gpu);
	for (int i = 0; i < sc.nfaults; i++) {
		struct fault *f = &sc.faults[i];
		if (f->left == 0 || (strcmp(f->l.word[1], "*") && strcmp(f->l.word[1], fn)))
			continue;
		if (strcmp(f->l.word[2], "*") && strcmp(f->l.word[2], index))
			continue;
		return f;
	}
	return NULL;
}

static void record(const char *fn, int gpu)
{
	char b[160];
	if (log_fd < 0)
		return;
	int n = snprintf(b, sizeof b, "%llu %ld %s %d\n", (unsigned long long)now_us() * 1000, syscall(SYS_gettid), fn, gpu);
	if (write(log_fd, b, n) != n)
		return;
}

// enter begins a call. gpu is the device's index, or -1.
static struct ctx enter(const char *fn, int gpu, int mig)
{
	struct ctx c = {.ret = -1, .gpu = gpu, .mig = mig};
	pthread_mutex_lock(&mu);
	reload();
	record(fn, gpu);
	struct fault *f;
	while ((f = fault_for(fn, gpu))) {
		const char *kind = f->l.word[3];
		uint64_t arg = number(f->l.words > 4 ? f->l.word[4] : "0");
		if (!strcmp(kind, "hang")) {
			// Stuck until the scenario no longer says so.
			pthread_mutex_unlock(&mu);
			sleep_ms(10);
			pthread_mutex_lock(&mu);
			reload();
			continue;
		}
		if (f->left > 0)
			f->left--;
		if (!strcmp(kind, "crash")) {
			*(volatile int *)0 = 1;
		} else if (!strcmp(kind, "abort")) {
			abort();
		} else if (!strcmp(kind, "exit")) {
			_exit(arg);
		} else if (!strcmp(kind, "delay")) {
			pthread_mutex_unlock(&mu);
			sleep_ms(arg);
			pthread_mutex_lock(&mu);
			reload();
		} else if (!strcmp(kind, "return")) {
			c.ret = arg;
			return c;
		} else {
			c.kind = !strcmp(kind, "fill") ? "fill" : !strcmp(kind, "count") ? "count" : !strcmp(kind, "insufficient") ? "insufficient" : NULL;
			c.arg = arg;
		}
		break;
	}
	if (!initialized && strncmp(fn, "nvmlInit", 8)) {
		c.ret = UNINITIALIZED;
		return c;
	}
	if (gpu >= 0) {
		if (gpu >= sc.gpus || (mig >= 0 && mig >= sc.migs[gpu]) || find(&sc.gpu[gpu], "lost"))
			c.ret = GPU_IS_LOST; // taken away after its handle was given out
		else
			c.s = mig >= 0 ? &sc.mig[gpu][mig] : &sc.gpu[gpu];
	}
	return c;
}

static struct ctx enter_device(const char *fn, nvmlDevice_t d)
{
	char *p = (char *)d, *base = (char *)handles;
	if (p < base || p >= base + sizeof handles || (p - base) % sizeof(struct nvmlDevice_st)) {
		struct ctx c = enter(fn, -1, -1);
		if (c.ret < 0)
			c.ret = INVALID_ARGUMENT;
		return c;
	}
	return enter(fn, d->gpu, d->mig);
}

static void leave(struct ctx *c)
{
	(void)c;
	pthread_mutex_unlock(&mu);
}

#define CALL(init)                                       \
	struct ctx c __attribute__((cleanup(leave))) = init; \
	if (c.ret >= 0)                                      \
	return c.ret
#define DEVICE(d) CALL(enter_device(__func__, d))
#define SYSTEM() CALL(enter(__func__, -1, -1))

static int filling(struct ctx *c, void *out, size_t n)
{
	if (!c->kind || strcmp(c->kind, "fill"))
		return 0;
	for (size_t i = 0; i < n; i++)
		((unsigned char *)out)[i] = c->arg >> 8 * (i % 8);
	return 1;
}

static int is(struct ctx *c, const char *kind) { return c->kind && !strcmp(c->kind, kind); }

// key looks up a value of the call's device; absent means not supported.
static struct line *key(struct ctx *c, const char *k) { return find(c->s, k); }

static nvmlReturn_t u32(struct ctx *c, const char *k, int word, unsigned int *out)
{
	if (!out)
		return INVALID_ARGUMENT;
	if (filling(c, out, sizeof *out))
		return OK;
	struct line *l = key(c, k);
	if (!l || l->words <= word)
		return NOT_SUPPORTED;
	*out = number(l->word[word]);
	return OK;
}

static nvmlReturn_t u64(struct ctx *c, const char *k, int word, unsigned long long *out)
{
	if (!out)
		return INVALID_ARGUMENT;
	if (filling(c, out, sizeof *out))
		return OK;
	struct line *l = key(c, k);
	if (!l || l->words <= word)
		return NOT_SUPPORTED;
	*out = number(l->word[word]);
	return OK;
}

static nvmlReturn_t copy(struct ctx *c, const char *s, char *out, unsigned int length)
{
	if (!out)
		return INVALID_ARGUMENT;
	if (filling(c, out, length))
		return OK;
	if (strlen(s) + 1 > length)
		return INSUFFICIENT_SIZE;
	strcpy(out, s);
	return OK;
}

static nvmlReturn_t text(struct ctx *c, const char *k, char *out, unsigned int length)
{
	struct line *l = find(c->s ? c->s : &sc.system, k);
	if (!l)
		return NOT_SUPPORTED;
	return copy(c, l->rest, out, length);
}

// ---- system ----

static nvmlReturn_t init(const char *fn)
{
	CALL(enter(fn, -1, -1));
	if (!sc.text)
		return DRIVER_NOT_LOADED;
	initialized++;
	return OK;
}

FN nvmlInit(void) { return init(__func__); }
FN nvmlInit_v2(void) { return init(__func__); }

FN nvmlShutdown(void)
{
	SYSTEM();
	initialized--;
	return OK;
}

FN nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	SYSTEM();
	return text(&c, "driver", version, length);
}

FN nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	SYSTEM();
	return text(&c, "nvml", version, length);
}

static nvmlReturn_t cuda(const char *fn, int *version)
{
	CALL(enter(fn, -1, -1));
	c.s = &sc.system;
	return u32(&c, "cuda", 1, (unsigned int *)version);
}

FN nvmlSystemGetCudaDriverVersion(int *cudaDriverVersion) { return cuda(__func__, cudaDriverVersion); }
FN nvmlSystemGetCudaDriverVersion_v2(int *cudaDriverVersion) { return cuda(__func__, cudaDriverVersion); }

static nvmlReturn_t count(const char *fn, unsigned int *n)
{
	CALL(enter(fn, -1, -1));
	if (!n)
		return INVALID_ARGUMENT;
	if (!filling(&c, n, sizeof *n))
		*n = sc.gpus;
	return OK;
}

FN nvmlDeviceGetCount(unsigned int *deviceCount) { return count(__func__, deviceCount); }
FN nvmlDeviceGetCount_v2(unsigned int *deviceCount) { return count(__func__, deviceCount); }

static nvmlReturn_t handle(const char *fn, unsigned int index, nvmlDevice_t *device)
{
	struct ctx c __attribute__((cleanup(leave))) = enter(fn, index < MAXGPU ? (int)index : -1, -1);
	if (initialized && (!device || index >= (unsigned int)sc.gpus))
		return INVALID_ARGUMENT;
	if (c.ret >= 0)
		return c.ret;
	*device = &handles[index][0];
	return OK;
}

FN nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) { return handle(__func__, index, device); }
FN nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { return handle(__func__, index, device); }

// ---- what a device is ----

#define TEXT(fn, k)                                                            \
	FN fn(nvmlDevice_t device, char *out, unsigned int length)                 \
	{                                                                          \
		DEVICE(device);                                                        \
		return text(&c, k, out, length);                                       \
	}
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")

#define U32(fn, type, k)                                                       \
	FN fn(nvmlDevice_t device, type *out)                                      \
	{                                                                          \
		DEVICE(device);                                                        \
		return u32(&c, k, 1, (unsigned int *)out);                             \
	}
U32(nvmlDeviceGetMinorNumber, unsigned int, "minor")
U32(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, "architecture")
U32(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, "persistence")
U32(nvmlDeviceGetComputeMode, nvmlComputeMode_t, "compute_mode")
U32(nvmlDeviceGetPowerUsage, unsigned int, "power")
U32(nvmlDeviceGetEnforcedPowerLimit, unsigned int, "power_limit")
U32(nvmlDeviceGetPerformanceState, nvmlPstates_t, "pstate")
U32(nvmlDeviceGetNumFans, unsigned int, "fans")
U32(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, "pcie_generation")
U32(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, "pcie_width")
U32(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, "pcie_generation_max")
U32(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, "pcie_width_max")
U32(nvmlDeviceGetPcieReplayCounter, unsigned int, "pcie_replays")
U32(nvmlDeviceGetRetiredPagesPendingStatus, nvmlEnableState_t, "retired_pending")
U32(nvmlDeviceGetGpuInstanceId, unsigned int, "gpu_instance")
U32(nvmlDeviceGetComputeInstanceId, unsigned int, "compute_instance")

// The nth argument after the key, for functions with a selector.
#define SELECT(fn, type, out_type, k, most)                                    \
	FN fn(nvmlDevice_t device, type which, out_type *out)                      \
	{                                                                          \
		DEVICE(device);                                                        \
		if ((unsigned int)which > most)                                        \
			return INVALID_ARGUMENT;                                           \
		return u32(&c, k, which + 1, (unsigned int *)out);                     \
	}
SELECT(nvmlDeviceGetTemperature, nvmlTemperatureSensors_t, unsigned int, "temperature", 0)
SELECT(nvmlDeviceGetTemperatureThreshold, nvmlTemperatureThresholds_t, unsigned int, "temperature_threshold", 7)
SELECT(nvmlDeviceGetClockInfo, nvmlClockType_t, unsigned int, "clock", 3)
SELECT(nvmlDeviceGetMaxClockInfo, nvmlClockType_t, unsigned int, "clock_max", 3)
SELECT(nvmlDeviceGetFanSpeed_v2, unsigned int, unsigned int, "fan_speed", 8)
SELECT(nvmlDeviceGetPcieThroughput, nvmlPcieUtilCounter_t, unsigned int, "pcie_throughput", 1)

FN nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *isActive)
{
	DEVICE(device);
	if (!key(&c, "nvlink"))
		return NOT_SUPPORTED;
	for (int i = 0; i < c.s->n; i++) {
		struct line *l = &c.s->lines[i]; // nvlink LINK ACTIVE REPLAY RECOVERY CRC_FLIT CRC_DATA
		if (!strcmp(l->word[0], "nvlink") && l->words > 2 && number(l->word[1]) == link) {
			if (!filling(&c, isActive, sizeof *isActive))
				*isActive = number(l->word[2]);
			return OK;
		}
	}
	return INVALID_ARGUMENT;
}

FN nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter, unsigned long long *counterValue)
{
	DEVICE(device);
	for (int i = 0; i < c.s->n; i++) {
		struct line *l = &c.s->lines[i];
		if (!strcmp(l->word[0], "nvlink") && number(l->word[1]) == link && l->words > 3 + (int)counter) {
			if (!filling(&c, counterValue, sizeof *counterValue))
				*counterValue = number(l->word[3 + counter]);
			return OK;
		}
	}
	return key(&c, "nvlink") ? INVALID_ARGUMENT : NOT_SUPPORTED;
}

static nvmlReturn_t pci(const char *fn, nvmlDevice_t device, nvmlPciInfo_t *p, int version)
{
	CALL(enter_device(fn, device));
	if (filling(&c, p, sizeof *p))
		return OK;
	struct line *l = key(&c, "pci");
	unsigned int domain, bus, dev;
	if (!l || sscanf(l->rest, "%x:%x:%x", &domain, &bus, &dev) != 3)
		return NOT_SUPPORTED;
	// Version 1 ends before busId; the bytes behind it belong to the caller.
	memset(p, 0, version >= 3 ? sizeof *p : offsetof(nvmlPciInfo_t, busId));
	p->domain = domain, p->bus = bus, p->device = dev;
	snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, dev & 0xff);
	if (version >= 3)
		snprintf(p->busId, sizeof p->busId, "%08X:%02X:%02X.0", domain, bus & 0xff, dev & 0xff);
	return OK;
}

FN nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *p) { return pci(__func__, device, p, 1); }
FN nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *p) { return pci(__func__, device, p, 2); }
FN nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *p) { return pci(__func__, device, p, 3); }

FN nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	DEVICE(device);
	nvmlReturn_t r = u32(&c, "cuda_capability", 1, (unsigned int *)major);
	return r != OK ? r : u32(&c, "cuda_capability", 2, (unsigned int *)minor);
}

FN nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *minLimit, unsigned int *maxLimit)
{
	DEVICE(device);
	nvmlReturn_t r = u32(&c, "power_limits", 1, minLimit);
	return r != OK ? r : u32(&c, "power_limits", 2, maxLimit);
}

FN nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode)
{
	DEVICE(device);
	nvmlReturn_t r = u32(&c, "mig_mode", 1, currentMode);
	return r != OK ? r : u32(&c, "mig_mode", 1, pendingMode);
}

FN nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *n)
{
	DEVICE(device);
	if (!key(&c, "mig_mode"))
		return NOT_SUPPORTED;
	if (!filling(&c, n, sizeof *n))
		*n = 7;
	return OK;
}

FN nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *migDevice)
{
	DEVICE(device);
	if (!key(&c, "mig_mode"))
		return NOT_SUPPORTED;
	if (index >= (unsigned int)sc.migs[c.gpu])
		return NOT_FOUND;
	*migDevice = &handles[c.gpu][index + 1];
	return OK;
}

FN nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *a)
{
	DEVICE(device);
	if (filling(&c, a, sizeof *a))
		return OK;
	struct line *l = key(&c, "attributes"); // attributes SMS GPU_SLICES COMPUTE_SLICES MEMORY_MIB
	if (!l || l->words < 5)
		return NOT_SUPPORTED;
	memset(a, 0, sizeof *a);
	a->multiprocessorCount = number(l->word[1]);
	a->gpuInstanceSliceCount = number(l->word[2]);
	a->computeInstanceSliceCount = number(l->word[3]);
	a->memorySizeMB = number(l->word[4]);
	return OK;
}

// ---- load ----

// busy_share is the share of a slot that a "busy" line fills: busy PID SM MEMORY ENCODER DECODER PERIOD_MS ON_MS. With a
// period the process is busy for the first ON_MS of each.
static double busy_share(struct line *l, uint64_t start_us, uint64_t length_us)
{
	uint64_t period = l->words > 6 ? number(l->word[6]) * 1000 : 0, on = l->words > 7 ? number(l->word[7]) * 1000 : 0, sum = 0;
	if (!period)
		return 1;
	for (uint64_t p = start_us / period * period; p < start_us + length_us; p += period) {
		uint64_t a = p > start_us ? p : start_us, b = p + on < start_us + length_us ? p + on : start_us + length_us;
		if (b > a)
			sum += b - a;
	}
	return (double)sum / length_us;
}

static unsigned int word(struct line *l, int i) { return i < l->words ? number(l->word[i]) : 0; }

// busy_sum adds up one column of the busy lines over a slot.
static unsigned int busy_sum(struct section *s, int column, uint64_t start_us)
{
	double sum = 0;
	for (int i = 0; i < s->n; i++)
		if (!strcmp(s->lines[i].word[0], "busy"))
			sum += word(&s->lines[i], column) * busy_share(&s->lines[i], start_us, SLOT_US);
	return sum > 100 ? 100 : (unsigned int)(sum + 0.5);
}

FN nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *u)
{
	DEVICE(device);
	if (filling(&c, u, sizeof *u))
		return OK;
	struct line *l = key(&c, "utilization");
	uint64_t slot = now_us() / SLOT_US * SLOT_US - SLOT_US;
	if (l) {
		u->gpu = word(l, 1), u->memory = word(l, 2);
	} else if (c.mig < 0) {
		u->gpu = busy_sum(c.s, 2, slot), u->memory = busy_sum(c.s, 3, slot);
	} else {
		return NOT_SUPPORTED;
	}
	return OK;
}

#define ENGINE(fn, k)                                                          \
	FN fn(nvmlDevice_t device, unsigned int *utilization, unsigned int *us)    \
	{                                                                          \
		DEVICE(device);                                                        \
		if (us)                                                                \
			*us = 167000;                                                      \
		return u32(&c, k, 1, utilization);                                     \
	}
ENGINE(nvmlDeviceGetEncoderUtilization, "encoder")
ENGINE(nvmlDeviceGetDecoderUtilization, "decoder")
ENGINE(nvmlDeviceGetJpgUtilization, "jpeg")
ENGINE(nvmlDeviceGetOfaUtilization, "ofa")

FN nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *m)
{
	DEVICE(device);
	if (filling(&c, m, sizeof *m))
		return OK;
	struct line *l = key(&c, "memory"); // memory TOTAL RESERVED USED
	if (!l || l->words < 4)
		return NOT_SUPPORTED;
	m->total = number(l->word[1]);
	m->used = number(l->word[3]) + number(l->word[2]); // version 1 counts the reserved part as used
	m->free = m->total - m->used;
	return OK;
}

FN nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *m)
{
	DEVICE(device);
	if (m->version != (sizeof *m | 2 << 24))
		return ARGUMENT_VERSION;
	if (filling(&c, m, sizeof *m))
		return OK;
	struct line *l = key(&c, "memory");
	if (!l || l->words < 4)
		return NOT_SUPPORTED;
	m->total = number(l->word[1]), m->reserved = number(l->word[2]), m->used = number(l->word[3]);
	m->free = m->total - m->used - m->reserved;
	return OK;
}

FN nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *b)
{
	DEVICE(device);
	if (filling(&c, b, sizeof *b))
		return OK;
	struct line *l = key(&c, "bar1"); // bar1 TOTAL USED
	if (!l || l->words < 3)
		return NOT_SUPPORTED;
	b->bar1Total = number(l->word[1]), b->bar1Used = number(l->word[2]);
	b->bar1Free = b->bar1Total - b->bar1Used;
	return OK;
}

// energy MILLIJOULES MILLIWATTS: the counter gains the second for each second of the machine's uptime.
FN nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
	DEVICE(device);
	nvmlReturn_t r = u64(&c, "energy", 1, energy);
	if (r == OK && !c.kind)
		*energy += word(key(&c, "energy"), 2) * uptime();
	return r;
}

static nvmlReturn_t reasons(const char *fn, nvmlDevice_t device, unsigned long long *r)
{
	CALL(enter_device(fn, device));
	return u64(&c, "throttle", 1, r);
}

FN nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *r) { return reasons(__func__, device, r); }
FN nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *r) { return reasons(__func__, device, r); }

FN nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t policy, nvmlViolationTime_t *v)
{
	DEVICE(device);
	if (filling(&c, v, sizeof *v))
		return OK;
	v->referenceTime = now_us();
	return u64(&c, "violation", policy + 1, &v->violationTime);
}

// ---- processes and samples ----

// running answers a running-process list with entries of the given stride: process KIND PID MEMORY GPU_INSTANCE COMPUTE_INSTANCE.
static nvmlReturn_t running(const char *fn, nvmlDevice_t device, unsigned int *n, void *out, size_t stride, const char *kind)
{
	CALL(enter_device(fn, device));
	struct section *s = &sc.gpu[c.gpu];
	if (!n)
		return INVALID_ARGUMENT;
	struct line *wide = find(&sc.system, "process_stride");
	if (wide && strstr(fn, "_v3"))
		stride = number(wide->word[1]);
	unsigned int have = 0, room = *n;
	if (filling(&c, out, stride * (room < 3 ? room : 3))) {
		*n = room < 3 ? room : 3;
		return OK;
	}
	if (is(&c, "insufficient")) {
		*n = room + 1;
		return INSUFFICIENT_SIZE;
	}
	for (int pass = 0; pass < 2; pass++) {
		have = 0;
		for (int i = 0; i < s->n; i++) {
			struct line *l = &s->lines[i];
			if (strcmp(l->word[0], "process") || l->words < 4 || strcmp(l->word[1], kind))
				continue;
			unsigned int gi = l->words > 4 ? number(l->word[4]) : 0xffffffff, ci = l->words > 5 ? number(l->word[5]) : 0xffffffff;
			if (c.mig >= 0 && gi != word(key(&c, "gpu_instance"), 1))
				continue;
			if (pass) {
				char *e = (char *)out + stride * have;
				memset(e, 0, stride);
				((nvmlProcessInfo_v1_t *)e)->pid = number(l->word[2]);
				((nvmlProcessInfo_v1_t *)e)->usedGpuMemory = number(l->word[3]);
				if (stride > sizeof(nvmlProcessInfo_v1_t)) {
					((nvmlProcessInfo_v2_t *)e)->gpuInstanceId = gi;
					((nvmlProcessInfo_v2_t *)e)->computeInstanceId = ci;
				}
			}
			have++;
		}
		if (!pass && have > room) {
			*n = have;
			return INSUFFICIENT_SIZE;
		}
	}
	*n = is(&c, "count") ? (unsigned int)c.arg : have;
	return OK;
}

#define RUNNING(fn, type, kind)                                                \
	FN fn(nvmlDevice_t device, unsigned int *infoCount, type *infos)           \
	{                                                                          \
		return running(__func__, device, infoCount, infos, sizeof(type), kind); \
	}
RUNNING(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, "compute")
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, "compute")
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, "compute")
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, "graphics")
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, "graphics")
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, "graphics")

// Samples are the "psample PID TIME SM MEMORY ENCODER DECODER" lines, then one per busy process and 200 ms of the last 14 s.
FN nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned int *n, unsigned long long since)
{
	DEVICE(device);
	if (!n)
		return INVALID_ARGUMENT;
	if (key(&c, "no_process_samples"))
		return NOT_SUPPORTED;
	unsigned int have = 0, room = out ? *n : 0;
	if (out && filling(&c, out, sizeof *out * (room < 3 ? room : 3))) {
		*n = room < 3 ? room : 3;
		return OK;
	}
	if (is(&c, "insufficient")) {
		*n = room + 1;
		return INSUFFICIENT_SIZE;
	}
	int stale = key(&c, "stale_samples") != NULL; // give old samples again, as some drivers do
	for (int i = 0; i < c.s->n; i++) {
		struct line *l = &c.s->lines[i];
		if (strcmp(l->word[0], "psample") || l->words < 4 || (number(l->word[2]) <= since && !stale))
			continue;
		if (have < room)
			out[have] = (nvmlProcessUtilizationSample_t){word(l, 1), number(l->word[2]), word(l, 3), word(l, 4), word(l, 5), word(l, 6)};
		have++;
	}
	uint64_t now = now_us(), first = now - 14000000;
	if (since > first)
		first = since;
	for (uint64_t t = first / SLOT_US * SLOT_US + SLOT_US; t <= now; t += SLOT_US) {
		for (int i = 0; i < c.s->n; i++) {
			struct line *l = &c.s->lines[i];
			if (strcmp(l->word[0], "busy") || l->words < 3)
				continue;
			double share = busy_share(l, t - SLOT_US, SLOT_US); // an H200 gives the zeros of an idle process too
			if (have < room)
				out[have] = (nvmlProcessUtilizationSample_t){word(l, 1), t, word(l, 2) * share + 0.5, word(l, 3) * share + 0.5,
					word(l, 4) * share + 0.5, word(l, 5) * share + 0.5};
			have++;
		}
	}
	*n = have;
	if (have > room)
		return INSUFFICIENT_SIZE;
	if (is(&c, "count"))
		*n = c.arg;
	else if (have == 0)
		return NOT_FOUND;
	return OK;
}

// The rings are the "sample RING TIME VALUE" lines, else generated: utilisation from the busy lines, power from the power line.
FN nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t ring, unsigned long long since, nvmlValueType_t *type, unsigned int *n,
	nvmlSample_t *out)
{
	DEVICE(device);
	if (!n || !type)
		return INVALID_ARGUMENT;
	if ((ring != 0 && ring != 1) || c.mig >= 0 || key(&c, "no_samples"))
		return NOT_SUPPORTED;
	struct line *given = key(&c, "sample_type"); // nvmlValueType_t of all samples
	*type = given ? word(given, 1) : 1;
	if (!out) {
		*n = ring ? 71 : 119;
		return OK;
	}
	unsigned int have = 0, room = *n;
	if (filling(&c, out, sizeof *out * (room < 3 ? room : 3))) {
		*n = room < 3 ? room : 3;
		return OK;
	}
	if (is(&c, "insufficient")) {
		*n = room + 1;
		return INSUFFICIENT_SIZE;
	}
	int explicit = 0;
	for (int i = 0; i < c.s->n; i++) {
		struct line *l = &c.s->lines[i];
		if (strcmp(l->word[0], "sample") || l->words < 4 || number(l->word[1]) != ring)
			continue;
		explicit = 1;
		if (number(l->word[2]) <= since && !key(&c, "stale_samples"))
			continue;
		if (have < room) {
			out[have].timeStamp = number(l->word[2]);
			if (*type == 0)
				out[have].sampleValue.dVal = strtod(l->word[3], NULL);
			else
				out[have].sampleValue.ullVal = number(l->word[3]);
			have++;
		}
	}
	uint64_t period = ring ? SLOT_US : POWER_US, now = now_us(), first = now - (ring ? 71 : 119) * period;
	if (since > first)
		first = since;
	struct line *power = key(&c, "power");
	for (uint64_t t = first / period * period + period; !explicit && t <= now && have < room; t += period) {
		if (!ring && !power)
			break;
		out[have].timeStamp = t;
		out[have].sampleValue.ullVal = ring ? busy_sum(c.s, 2, t - SLOT_US) : word(power, 1);
		have++;
	}
	*n = is(&c, "count") ? (unsigned int)c.arg : have;
	return *n ? OK : NOT_FOUND;
}

// field ID SCOPE TYPE VALUE RATE: RATE is what the value gains per second of uptime; a 32-bit one wraps.
FN nvmlDeviceGetFieldValues(nvmlDevice_t device, int n, nvmlFieldValue_t *v)
{
	DEVICE(device);
	if (n <= 0 || !v)
		return INVALID_ARGUMENT;
	for (int i = 0; i < n; i++) {
		v[i].nvmlReturn = NOT_SUPPORTED;
		v[i].timestamp = now_us();
		for (int j = 0; j < c.s->n; j++) {
			struct line *l = &c.s->lines[j];
			if (strcmp(l->word[0], "field") || l->words < 5 || number(l->word[1]) != v[i].fieldId || number(l->word[2]) != v[i].scopeId)
				continue;
			v[i].nvmlReturn = OK;
			v[i].valueType = number(l->word[3]);
			if (filling(&c, &v[i].value, sizeof v[i].value)) {
			} else if (v[i].valueType == 0) {
				v[i].value.dVal = strtod(l->word[4], NULL);
			} else {
				uint64_t x = number(l->word[4]) + (l->words > 5 ? (uint64_t)(number(l->word[5]) * uptime()) : 0);
				if (v[i].valueType == 1)
					v[i].value.uiVal = x;
				else
					v[i].value.ullVal = x;
			}
			break;
		}
	}
	return OK;
}

// ---- health ----

FN nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter, unsigned long long *n)
{
	DEVICE(device);
	if ((unsigned int)error > 1 || (unsigned int)counter > 1)
		return INVALID_ARGUMENT;
	// ecc VOLATILE_CORRECTED VOLATILE_UNCORRECTED AGGREGATE_CORRECTED AGGREGATE_UNCORRECTED
	return u64(&c, "ecc", 1 + 2 * counter + error, n);
}

FN nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *n, unsigned long long *addresses)
{
	DEVICE(device);
	unsigned int have, room = *n;
	nvmlReturn_t r = u32(&c, "retired_pages", 1 + cause, &have); // retired_pages SINGLE_BIT DOUBLE_BIT
	if (r != OK)
		return r;
	*n = have;
	if (have > room)
		return INSUFFICIENT_SIZE;
	if (have && addresses)
		memset(addresses, 0, have * sizeof *addresses);
	return OK;
}

FN nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending, unsigned int *failure)
{
	DEVICE(device);
	unsigned int *out[] = {corrected, uncorrected, pending, failure};
	for (int i = 0; i < 4; i++) {
		nvmlReturn_t r = u32(&c, "remapped_rows", i + 1, out[i]);
		if (r != OK)
			return r;
	}
	return OK;
}

FN nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessions, unsigned int *fps, unsigned int *latency)
{
	DEVICE(device);
	*fps = *latency = 0;
	return u32(&c, "encoder_sessions", 1, sessions);
}

// ---- events: event TYPE DATA GPU_INSTANCE COMPUTE_INSTANCE; a line that was added after the registration is news ----

static int events(struct section *s)
{
	int n = 0;
	for (int i = 0; i < s->n; i++)
		n += !strcmp(s->lines[i].word[0], "event");
	return n;
}

FN nvmlEventSetCreate(nvmlEventSet_t *set)
{
	SYSTEM();
	*set = calloc(1, sizeof **set);
	return OK;
}

FN nvmlEventSetFree(nvmlEventSet_t set)
{
	SYSTEM();
	free(set);
	return OK;
}

FN nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	DEVICE(device);
	return u64(&c, "event_types", 1, types);
}

FN nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	DEVICE(device);
	if (!set || types & ~number(key(&c, "event_types") ? key(&c, "event_types")->word[1] : "0"))
		return NOT_SUPPORTED;
	set->mask[c.gpu] |= types;
	set->delivered[c.gpu] = events(c.s);
	return OK;
}

static nvmlReturn_t next_event(const char *fn, nvmlEventSet_t set, nvmlEventData_t *data, int version)
{
	CALL(enter(fn, -1, -1));
	for (int g = 0; g < sc.gpus; g++) {
		int n = 0, total = events(&sc.gpu[g]);
		if (!set->mask[g])
			continue;
		if (set->delivered[g] > total)
			set->delivered[g] = total; // the scenario was replaced by one with fewer
		for (int i = 0; i < sc.gpu[g].n; i++) {
			struct line *l = &sc.gpu[g].lines[i];
			if (strcmp(l->word[0], "event") || n++ < set->delivered[g])
				continue;
			set->delivered[g] = n;
			if (!(number(l->word[1]) & set->mask[g]))
				continue;
			data->device = &handles[g][0];
			data->eventType = number(l->word[1]);
			data->eventData = l->words > 2 ? number(l->word[2]) : 0;
			if (version >= 2) {
				data->gpuInstanceId = l->words > 3 ? number(l->word[3]) : 0xffffffff;
				data->computeInstanceId = l->words > 4 ? number(l->word[4]) : 0xffffffff;
			}
			return OK;
		}
	}
	return TIMEOUT;
}

static nvmlReturn_t wait_event(const char *fn, nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms, int version)
{
	uint64_t until = clock_us(CLOCK_MONOTONIC) + (uint64_t)ms * 1000;
	for (;;) {
		nvmlReturn_t r = next_event(fn, set, data, version);
		fn = "nvmlEventSetWait (waiting)";
		if (r != TIMEOUT || clock_us(CLOCK_MONOTONIC) >= until)
			return r;
		sleep_ms(ms < 50 ? 5 : 50);
	}
}

FN nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms) { return wait_event(__func__, set, data, ms, 1); }
FN nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms) { return wait_event(__func__, set, data, ms, 2); }

// ---- GPM: gpm METRIC VALUE, the mean between any two samples ----

FN nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *s)
{
	DEVICE(device);
	if (s->version != 1)
		return ARGUMENT_VERSION;
	if (!filling(&c, s, sizeof *s))
		s->isSupportedDevice = key(&c, "gpm") != NULL;
	return OK;
}

FN nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	SYSTEM();
	*sample = calloc(1, sizeof **sample);
	(*sample)->gpu = -1;
	return OK;
}

FN nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	SYSTEM();
	free(sample);
	return OK;
}

FN nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	DEVICE(device);
	if (!key(&c, "gpm"))
		return NOT_SUPPORTED;
	sample->gpu = c.gpu;
	sample->us = now_us();
	return OK;
}

FN nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *g)
{
	SYSTEM();
	if (g->version != 1)
		return ARGUMENT_VERSION;
	if (!g->sample1 || !g->sample2 || g->sample1->gpu < 0 || g->sample1->gpu != g->sample2->gpu || g->sample1->us > g->sample2->us)
		return INVALID_ARGUMENT;
	if (g->sample1->gpu >= sc.gpus)
		return GPU_IS_LOST;
	struct section *s = &sc.gpu[g->sample1->gpu];
	for (unsigned int i = 0; i < g->numMetrics; i++) {
		g->metrics[i].nvmlReturn = NOT_SUPPORTED;
		for (int j = 0; j < s->n; j++) {
			struct line *l = &s->lines[j];
			if (strcmp(l->word[0], "gpm") || l->words < 3 || number(l->word[1]) != g->metrics[i].metricId)
				continue;
			g->metrics[i].nvmlReturn = OK;
			if (!filling(&c, &g->metrics[i].value, sizeof g->metrics[i].value))
				g->metrics[i].value = strtod(l->word[2], NULL);
		}
	}
	return OK;
}
