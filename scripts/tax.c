// What a call costs, in ns: one line a kind of call, its name and the figure, a tab between. scripts/tracer-tax runs this with the tracer off and on.
// Usage: tax DEVICE LIBCUDA [probed]   DEVICE is what the tracer traces; probed: wait until the library's functions have their probes.
// Compiled with -DLIBCUDA this is the library: a libcuda whose functions return at once.
#include <stddef.h>
#include <stdint.h>
#ifdef LIBCUDA
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t bytes) { *p = 4096; return 0; }
int cuMemFree_v2(uint64_t p) { return 0; }
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int (*copy)(uint64_t, const void *, size_t), (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
static int device, other, zero;
static const char *file;
static long failed;

static void getppid_(void) { syscall(SYS_getppid); }
static void read_(void) { char c; failed += syscall(SYS_read, zero, &c, 1) != 1; }
static void open_(void)
{
	int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC);

	failed += fd < 0;
	syscall(SYS_close, fd);
}
static void ioctl_(void) { int n; failed += syscall(SYS_ioctl, other, FIONREAD, &n) != 0; }

// NVIDIA's RM_CONTROL and RM_FREE of a client that does not exist: the driver answers 0 and puts its refusal into the block. Other devices
// refuse the number itself.
static void control(void)
{
	uint32_t block[8] = {0xdead, 0xdead};

	syscall(SYS_ioctl, device, 0xc020462a, block);
}
static void release_object(void)
{
	uint32_t block[4] = {0xdead, 0xdead, 0xdead};

	failed += syscall(SYS_ioctl, device, 0xc0104629, block) != 0;
}
static void copied(void) { copy(0, 0, 1); }
static void allocated(void)
{
	uint64_t p;

	allocate(&p, 4096);
	release(p);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int order(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

// measure prints the median of some loops.
static void measure(const char *name, void (*call)(void), int loops, int calls)
{
	double each[16];

	failed = 0;
	for (int l = 0; l < loops; l++) {
		double began = now();

		for (int i = 0; i < calls; i++)
			call();
		each[l] = (now() - began) / calls;
	}
	qsort(each, loops, sizeof(*each), order);
	if (!failed)
		printf("%s\t%.1f\n", name, each[loops / 2]);
}

int main(int argc, char **argv)
{
	unsigned char before, *code;
	void *library;
	int pair[2];

	if (argc < 3 || !(library = dlopen(argv[2], RTLD_NOW))) {
		fprintf(stderr, "usage: tax DEVICE LIBCUDA [probed] (%s)\n", argc < 3 ? "arguments missing" : dlerror());
		return 2;
	}
	*(void **)&copy = dlsym(library, "cuMemcpyHtoD_v2");
	*(void **)&allocate = dlsym(library, "cuMemAlloc_v2");
	*(void **)&release = dlsym(library, "cuMemFree_v2");
	if (!copy || !allocate || !release || pipe(pair) || (zero = open("/dev/zero", O_RDONLY)) < 0) {
		fprintf(stderr, "tax: %s has not the functions, or no descriptors are left\n", argv[2]);
		return 2;
	}
	other = pair[0];
	file = argv[0];
	*(void **)&code = (void *)release; // the last one that is probed, by the order of the list
	before = *(volatile unsigned char *)code;
	if ((device = open(argv[1], O_RDWR)) < 0) { // by this the tracer learns of the process, and of its libraries
		perror(argv[1]);
		return 2;
	}
	if (argc > 3) {
		for (int i = 0; *(volatile unsigned char *)code == before; i++) {
			if (i == 1000) {
				fprintf(stderr, "tax: no probe in 10 s\n");
				return 1;
			}
			usleep(10000);
		}
		usleep(500000); // the others
	}
	measure("getppid", getppid_, 5, 100000);
	measure("read of /dev/zero", read_, 5, 100000);
	measure("open and close of another file", open_, 5, 20000);
	measure("ioctl of a pipe", ioctl_, 5, 100000);
	measure("ioctl of the device", control, 5, 50000);
	measure("ioctl of the device, with a record", release_object, 1, 10000); // more in a second are cut
	measure("copy by libcuda", copied, 5, 10000);
	measure("allocation and free by libcuda", allocated, 5, 5000);
	return 0;
}
#endif
