// Opens a device and copies with the stand-in libcuda: 1000 bytes, and 234 more as the last thing that it does.
#include <fcntl.h>
#include <stdio.h>
#include <stdint.h>
int cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, void *), cuMemAlloc_v2(uint64_t *, size_t);
int main(void)
{
	char b[2000];
	uint64_t p;
	open("/dev/zero", O_RDONLY);
	puts("ready"); fflush(stdout);
	getchar();
	cuMemAlloc_v2(&p, 4096);
	cuMemcpyHtoDAsync_v2(p, b, 1000, NULL);
	getchar();
	cuMemcpyHtoDAsync_v2(p, b, 234, NULL);
	return 0;
}
