/* The floor: a program that opens NVML and makes the calls that nvml-worker makes on device 0, at the same periods, and nothing else.
 * Build: gcc -O2 -I nvml/fake/src -o floor scripts/floor.c -ldl
 * On SIGTERM it prints, per call, how often it was made and what CPU time and wall time one took. */
#include "abi.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static volatile sig_atomic_t stop;
static void on_term(int sig) { (void)sig; stop = 1; }

static double now(clockid_t clock) {
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct call {
	const char *name;
	long n;
	double cpu, wall;
} calls[64];

static struct call *find(const char *name) {
	struct call *c = calls;
	while (c->name && c->name != name)
		c++;
	c->name = name;
	return c;
}

static void *lib;
static nvmlDevice_t dev;

/* CALL makes one NVML call by its symbol and sums what it took; a symbol that the library lacks is left out. */
#define CALL(label, symbol, types, ...) \
	do { \
		static nvmlReturn_t(*f) types; \
		if (!f) \
			f = (nvmlReturn_t(*) types)dlsym(lib, symbol); \
		if (f) { \
			struct call *c = find(label); \
			double cpu = now(CLOCK_THREAD_CPUTIME_ID), wall = now(CLOCK_MONOTONIC); \
			f(__VA_ARGS__); \
			c->cpu += now(CLOCK_THREAD_CPUTIME_ID) - cpu; \
			c->wall += now(CLOCK_MONOTONIC) - wall; \
			c->n++; \
		} \
	} while (0)


static unsigned int u;
static unsigned long long ull;

static void load(void) {
	static nvmlMemory_v2_t memory = {.version = sizeof(nvmlMemory_v2_t) | 2 << 24};
	static nvmlUtilization_t util;
	static nvmlProcessInfo_t procs[64];
	unsigned int n = 64;
	CALL("MemoryInfo_v2", "nvmlDeviceGetMemoryInfo_v2", (nvmlDevice_t, void *), dev, &memory);
	CALL("UtilizationRates", "nvmlDeviceGetUtilizationRates", (nvmlDevice_t, void *), dev, &util);
	CALL("Temperature", "nvmlDeviceGetTemperature", (nvmlDevice_t, unsigned int, unsigned int *), dev, 0, &u);
	nvmlFieldValue_t field = {.fieldId = 82};
	CALL("FieldValues(memory temperature)", "nvmlDeviceGetFieldValues", (nvmlDevice_t, int, void *), dev, 1, &field);
	CALL("PowerUsage", "nvmlDeviceGetPowerUsage", (nvmlDevice_t, unsigned int *), dev, &u);
	CALL("EnforcedPowerLimit", "nvmlDeviceGetEnforcedPowerLimit", (nvmlDevice_t, unsigned int *), dev, &u);
	CALL("PerformanceState", "nvmlDeviceGetPerformanceState", (nvmlDevice_t, unsigned int *), dev, &u);
	CALL("ThrottleReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", (nvmlDevice_t, unsigned long long *), dev, &ull);
	unsigned int period;
	CALL("EncoderUtilization", "nvmlDeviceGetEncoderUtilization", (nvmlDevice_t, unsigned int *, unsigned int *), dev, &u, &period);
	CALL("DecoderUtilization", "nvmlDeviceGetDecoderUtilization", (nvmlDevice_t, unsigned int *, unsigned int *), dev, &u, &period);
	CALL("JpgUtilization", "nvmlDeviceGetJpgUtilization", (nvmlDevice_t, unsigned int *, unsigned int *), dev, &u, &period);
	CALL("OfaUtilization", "nvmlDeviceGetOfaUtilization", (nvmlDevice_t, unsigned int *, unsigned int *), dev, &u, &period);
	for (unsigned int clock = 0; clock < 4; clock++)
		CALL("ClockInfo", "nvmlDeviceGetClockInfo", (nvmlDevice_t, unsigned int, unsigned int *), dev, clock, &u);
	CALL("ComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v3", (nvmlDevice_t, unsigned int *, void *), dev, &n, procs);
	n = 64;
	CALL("GraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v3", (nvmlDevice_t, unsigned int *, void *), dev, &n, procs);
}

static void process_samples(void) {
	static nvmlProcessUtilizationSample_t list[256];
	static unsigned long long last;
	unsigned int n = 256;
	CALL("ProcessUtilization", "nvmlDeviceGetProcessUtilization", (nvmlDevice_t, void *, unsigned int *, unsigned long long), dev, list, &n, last);
	last = (unsigned long long)(now(CLOCK_REALTIME) * 1e6);
}

static void ring(const char *label, int which, unsigned long long *last) {
	static nvmlSample_t list[512];
	nvmlValueType_t type;
	unsigned int n = 512;
	CALL(label, "nvmlDeviceGetSamples", (nvmlDevice_t, unsigned int, unsigned long long, void *, unsigned int *, void *), dev, which, *last, &type, &n, list);
	*last = (unsigned long long)(now(CLOCK_REALTIME) * 1e6);
}

static void gpm(void) {
	static nvmlGpmSample_t a, b;
	static nvmlGpmMetricsGet_t get;
	static const unsigned int ids[] = {1, 2, 3, 5, 10, 11, 12, 13, 20, 21, 60, 61};
	if (!a) {
		CALL("GpmSampleAlloc", "nvmlGpmSampleAlloc", (nvmlGpmSample_t *), &a);
		CALL("GpmSampleAlloc", "nvmlGpmSampleAlloc", (nvmlGpmSample_t *), &b);
		if (!a || !b)
			return;
	}
	CALL("GpmSampleGet", "nvmlGpmSampleGet", (nvmlDevice_t, nvmlGpmSample_t), dev, b);
	get.version = 1;
	get.numMetrics = sizeof ids / sizeof *ids;
	get.sample1 = a;
	get.sample2 = b;
	for (unsigned int i = 0; i < get.numMetrics; i++)
		get.metrics[i].metricId = ids[i];
	CALL("GpmMetricsGet", "nvmlGpmMetricsGet", (void *), &get);
	nvmlGpmSample_t t = a;
	a = b;
	b = t;
}

static void health(void) {
	unsigned int v[4];
	static nvmlBAR1Memory_t bar1;
	CALL("BAR1MemoryInfo", "nvmlDeviceGetBAR1MemoryInfo", (nvmlDevice_t, void *), dev, &bar1);
	for (unsigned int i = 0; i < 4; i++)
		CALL("TotalEccErrors", "nvmlDeviceGetTotalEccErrors", (nvmlDevice_t, unsigned int, unsigned int, unsigned long long *), dev, i & 1, i >> 1, &ull);
	CALL("RemappedRows", "nvmlDeviceGetRemappedRows", (nvmlDevice_t, unsigned int *, unsigned int *, unsigned int *, unsigned int *), dev, v, v + 1, v + 2, v + 3);
	CALL("CurrPcieLink", "nvmlDeviceGetCurrPcieLinkGeneration", (nvmlDevice_t, unsigned int *), dev, &u);
	CALL("CurrPcieLink", "nvmlDeviceGetCurrPcieLinkWidth", (nvmlDevice_t, unsigned int *), dev, &u);
	CALL("PcieReplayCounter", "nvmlDeviceGetPcieReplayCounter", (nvmlDevice_t, unsigned int *), dev, &u);
}

int main(int argc, char **argv) {
	/* Periods in seconds: process samples, utilisation ring, power ring, energy, GPM, health. 0: never. */
	int every[6] = {3, 10, 2, 10, 5, 10};
	for (int i = 1; i < argc && i <= 6; i++)
		every[i - 1] = atoi(argv[i]);
	signal(SIGTERM, on_term);
	signal(SIGINT, on_term);
	lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "floor: %s\n", dlerror());
		return 1;
	}
	CALL("Init", "nvmlInit_v2", (void));
	CALL("HandleByIndex", "nvmlDeviceGetHandleByIndex_v2", (unsigned int, nvmlDevice_t *), 0, &dev);
	if (!dev) {
		fprintf(stderr, "floor: no device 0\n");
		return 1;
	}
	static unsigned long long power, util;
	struct timespec next;
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (long t = 0; !stop; t++) {
		load();
		if (every[0] && t % every[0] == 0)
			process_samples();
		if (every[1] && t % every[1] == 0)
			ring("Samples(utilisation)", 1, &util);
		if (every[2] && t % every[2] == 0)
			ring("Samples(power)", 0, &power);
		if (every[3] && t % every[3] == 0)
			CALL("TotalEnergyConsumption", "nvmlDeviceGetTotalEnergyConsumption", (nvmlDevice_t, unsigned long long *), dev, &ull);
		if (every[4] && t % every[4] == 0)
			gpm();
		if (every[5] && t % every[5] == 0)
			health();
		next.tv_sec++;
		while (!stop && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL))
			;
	}
	fprintf(stderr, "%-34s %8s %12s %12s\n", "call", "number", "CPU ms each", "wall ms each");
	for (struct call *c = calls; c->name; c++)
		fprintf(stderr, "%-34s %8ld %12.3f %12.3f\n", c->name, c->n, c->cpu / c->n * 1e3, c->wall / c->n * 1e3);
	return 0;
}
