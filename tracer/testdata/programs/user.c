// Calls the stand-in when told to: "ready", a line on standard input, the calls, "done", and lives until standard input ends.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t ptr;
int cuMemcpyHtoDAsync_v2(ptr, const void *, size_t, void *), cuMemcpyHtoDAsync_v2_ptsz(ptr, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, ptr, size_t, void *), cuMemcpyDtoHAsync_v2_ptsz(void *, ptr, size_t, void *);
int cuMemcpyHtoD_v2(ptr, const void *, size_t), cuMemcpyHtoD_v2_ptds(ptr, const void *, size_t);
int cuMemcpyDtoH_v2(void *, ptr, size_t), cuMemcpyDtoH_v2_ptds(void *, ptr, size_t);
int cuMemcpy(ptr, ptr, size_t), cuMemcpyAsync(ptr, ptr, size_t, void *), cuMemcpyAsync_ptsz(ptr, ptr, size_t, void *);
int cuMemcpyDtoD_v2(ptr, ptr, size_t), cuMemsetD8_v2(ptr, unsigned char, size_t);
int cuMemcpy2D_v2(const void *), cuMemcpy2DUnaligned_v2(const void *), cuMemcpy2DAsync_v2(const void *, void *);
int cuMemcpy3D_v2(const void *), cuMemcpy3DAsync_v2(const void *, void *);
int cuMemAlloc_v2(ptr *, size_t), cuMemAllocManaged(ptr *, size_t, unsigned), cuMemAllocAsync(ptr *, size_t, void *);
int cuMemAllocFromPoolAsync_ptsz(ptr *, size_t, void *, void *), cuMemAllocPitch_v2(ptr *, size_t *, size_t, size_t, unsigned);
int cuMemCreate(ptr *, size_t, const void *, unsigned long long), cuMemFree_v2(ptr), cuMemFreeAsync(ptr, void *), cuMemRelease(ptr);
int cuLaunchKernel(void *), cuGraphLaunch(void *, void *);

struct copy2d { uint64_t sx, sy; uint32_t st, p1; uint64_t sh, sd, sa, sp, dx, dy; uint32_t dt, p2; uint64_t dh, dd, da, dp, w, h; };
struct copy3d { uint64_t sx, sy, sz, sl; uint32_t st, p1; uint64_t sh, sd, sa, r0, sp, shh, dx, dy, dz, dl; uint32_t dt, p2; uint64_t dh, dd, da, r1, dp, dhh, w, h, d; };

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }

int main(int argc, char **argv)
{
	char line[64], host[64];
	ptr a, b, c, d, e, f, h, hh, none = 0;
	size_t pitch;
	uint32_t device[8] = {1, 0, 1, 0}, system[8] = {1, 0, 2, 0};

	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		if (!strcmp(line, "copies\n")) {
			struct copy2d up2 = {.st = 1, .dt = 2, .w = 100, .h = 7}, down2 = {.st = 3, .dt = 1, .w = 10, .h = 3}, same2 = {.st = 2, .dt = 3, .w = 999, .h = 9};
			struct copy3d up3 = {.st = 1, .dt = 3, .w = 11, .h = 13, .d = 17}, down3 = {.st = 2, .dt = 1, .w = 5, .h = 5, .d = 5};
			cuMemAlloc_v2(&a, 1 << 20);
			cuMemcpyHtoD_v2(a, host, 1);
			cuMemcpyHtoD_v2_ptds(a, host, 20);
			cuMemcpyHtoDAsync_v2(a, host, 300, NULL);
			cuMemcpyHtoDAsync_v2_ptsz(a, host, 5ul << 32, NULL);
			cuMemcpyDtoH_v2(host, a, 2);
			cuMemcpyDtoH_v2_ptds(host, a, 30);
			cuMemcpyDtoHAsync_v2(host, a, 400, NULL);
			cuMemcpyDtoHAsync_v2_ptsz(host, a, 6ul << 32, NULL);
			cuMemcpy(a + 100, (ptr)host, 7000);
			cuMemcpyAsync((ptr)host, a + (1 << 20) - 1, 8000, NULL);
			cuMemcpyAsync_ptsz(a, a, 123456, NULL);
			cuMemcpy((ptr)host, (ptr)&line, 77);
			cuMemcpyDtoD_v2(a, a, 1 << 30);
			cuMemsetD8_v2(a, 0, 1 << 30);
			cuMemcpy2D_v2(&up2);
			cuMemcpy2DUnaligned_v2(&down2);
			cuMemcpy2DAsync_v2(&same2, NULL);
			cuMemcpy3D_v2(&up3);
			cuMemcpy3DAsync_v2(&down3, NULL);
			cuMemcpy3D_v2((void *)8);
			cuMemFree_v2(a);
			cuLaunchKernel(NULL);
			cuLaunchKernel(NULL);
			cuGraphLaunch(NULL, NULL);
		} else if (!strcmp(line, "allocate\n")) {
			cuMemAlloc_v2(&a, 1000);
			cuMemAllocManaged(&b, 20000, 1);
			cuMemAllocAsync(&c, 300000, NULL);
			cuMemAllocFromPoolAsync_ptsz(&d, 4000000, NULL, NULL);
			cuMemAllocPitch_v2(&e, &pitch, 1000, 10, 4);
			cuMemCreate(&h, 2 << 20, device, 0);
			cuMemCreate(&hh, 2 << 20, system, 0);
			cuMemAlloc_v2(&f, 1ul << 50);
			cuMemFree_v2(none);
			cuMemFree_v2(0x1234);
		} else if (!strcmp(line, "free\n")) {
			cuMemFree_v2(a);
			cuMemFree_v2(a);
			cuMemFree_v2(b);
			cuMemFreeAsync(c, NULL);
			cuMemFreeAsync(d, NULL);
			cuMemFree_v2(e);
			cuMemRelease(h);
			cuMemRelease(hh);
		} else if (!strcmp(line, "time\n")) {
			double t = now();
			for (int i = 0; i < 200000; i++)
				cuMemcpyDtoH_v2_ptds(host, 0, 0);
			printf("%.0f\n", (now() - t) / 200000);
			continue;
		}
		puts("done");
	}
	return 0;
}
