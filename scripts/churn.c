// A job that has short processes: COUNT of them within SECONDS, each with a name of its own, which open DEVICE, call it, load LIBCUDA and allocate
// with it, start threads, fork while they hold the device, execute another program, and end well, badly or by a signal, by turns and at random.
// The job itself holds the device and the library all the time.
// Usage: churn DEVICE LIBCUDA COUNT SECONDS
// Compiled with -DLIBCUDA this is the library: each allocation has another address.
#include <stddef.h>
#ifdef LIBCUDA
#include <stdint.h>
int cuMemAlloc_v2(uint64_t *p, size_t bytes)
{
	static uint64_t next = 1 << 20;

	*p = next;
	next += bytes;
	return 0;
}
int cuMemFree_v2(uint64_t p) { return 0; }
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static const char *device, *library;

static void wait_ms(int ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

	while (nanosleep(&t, &t))
		;
}

// hold opens the device and calls it with numbers that the driver has and others.
static int hold(int calls)
{
	int fd = open(device, O_RDWR);
	char block[4096] = {0};

	for (int i = 0; fd >= 0 && i < calls; i++)
		ioctl(fd, 0xc0204600 + rand() % 256, block);
	return fd;
}

// cuda loads the library and allocates; half of what it holds is never freed.
static void cuda(void)
{
	void *l = dlopen(library, RTLD_NOW);
	int (*allocate)(uint64_t *, size_t) = l ? dlsym(l, "cuMemAlloc_v2") : NULL, (*release)(uint64_t) = l ? dlsym(l, "cuMemFree_v2") : NULL;

	for (int i = 0; allocate && release && i < 4; i++) {
		uint64_t p;

		allocate(&p, 1 << 20);
		if (i % 2)
			release(p);
	}
}

static void *thread(void *arg)
{
	int fd = hold(2);

	wait_ms(rand() % 200);
	if (rand() % 2)
		close(fd);
	return NULL;
}

static void child(int n)
{
	char name[16];
	pthread_t t;

	srand(time(NULL) ^ getpid() << 8 ^ n);
	snprintf(name, sizeof name, "w%d-%d", n, rand());
	prctl(PR_SET_NAME, name);
	int fd = hold(rand() % 8);
	if (n % 3 == 0)
		cuda();
	if (n % 4 == 0 && !pthread_create(&t, NULL, thread, NULL))
		pthread_join(t, NULL);
	if (n % 5 == 0 && !fork()) {
		wait_ms(rand() % 1000);
		_exit(0);
	}
	if (n % 7 == 0) // passed on: the descriptor stays open
		execl("/proc/self/exe", "churn", "pause", NULL);
	wait_ms(rand() % 2 ? rand() % 50 : rand() % 3000);
	if (n % 2)
		close(fd);
	if (n % 11 == 0)
		raise(SIGKILL);
	_exit(n % 13 == 0);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "pause")) {
		wait_ms(300);
		return 0;
	}
	if (argc != 5 || atoi(argv[3]) < 1) {
		fprintf(stderr, "usage: churn DEVICE LIBCUDA COUNT SECONDS\n");
		return 2;
	}
	device = argv[1];
	library = argv[2];
	signal(SIGCHLD, SIG_IGN);
	int fd = hold(8), count = atoi(argv[3]), each = atoi(argv[4]) * 1000 / count;
	if (fd < 0) {
		perror(device);
		return 1;
	}
	cuda();
	for (int i = 0; i < count; i++) {
		if (!fork())
			child(i);
		wait_ms(each);
	}
	return 0;
}
#endif
