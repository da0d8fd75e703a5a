// A stand-in for libcuda.so.1: exports that do next to nothing, with the real prototypes.
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef uint64_t ptr;

static ptr next_pointer = 0x700000000000;

CUresult cuMemcpyHtoDAsync_v2(ptr d, const void *s, size_t n, void *st) { return 0; }
CUresult cuMemcpyHtoDAsync_v2_ptsz(ptr d, const void *s, size_t n, void *st) { return 0; }
CUresult cuMemcpyDtoHAsync_v2(void *d, ptr s, size_t n, void *st) { return 0; }
CUresult cuMemcpyDtoHAsync_v2_ptsz(void *d, ptr s, size_t n, void *st) { return 0; }
// These call other exports, as a library may.
CUresult cuMemcpyHtoD_v2(ptr d, const void *s, size_t n) { return cuMemcpyHtoDAsync_v2(d, s, n, NULL) + (int)(d & 0); }
CUresult cuMemcpyHtoD_v2_ptds(ptr d, const void *s, size_t n) { int r = cuMemcpyHtoDAsync_v2(d, s, n, NULL); return r; }
CUresult cuMemcpyDtoH_v2(void *d, ptr s, size_t n) { int r = cuMemcpyDtoHAsync_v2(d, s, n, NULL); return r; }
CUresult cuMemcpyDtoH_v2_ptds(void *d, ptr s, size_t n) { return 0; }
CUresult cuMemcpy(ptr d, ptr s, size_t n) { return 0; }
CUresult cuMemcpyAsync(ptr d, ptr s, size_t n, void *st) { return 0; }
CUresult cuMemcpyAsync_ptsz(ptr d, ptr s, size_t n, void *st) { return 0; }
CUresult cuMemcpyDtoD_v2(ptr d, ptr s, size_t n) { return 0; }
CUresult cuMemsetD8_v2(ptr d, unsigned char v, size_t n) { return 0; }
CUresult cuMemcpy2D_v2(const void *c) { return 0; }
CUresult cuMemcpy2DUnaligned_v2(const void *c) { return 0; }
CUresult cuMemcpy2DAsync_v2(const void *c, void *st) { return 0; }
CUresult cuMemcpy3D_v2(const void *c) { return 0; }
CUresult cuMemcpy3DAsync_v2(const void *c, void *st) { return 0; }
CUresult cuMemAlloc_v2(ptr *p, size_t n)
{
	if (n > 1ul << 40)
		return 2;
	*p = next_pointer;
	next_pointer += (n + 0xfffff) & ~0xffffful;
	return 0;
}
CUresult cuMemAllocManaged(ptr *p, size_t n, unsigned f) { int r = cuMemAlloc_v2(p, n); return r; }
CUresult cuMemAllocAsync(ptr *p, size_t n, void *st) { int r = cuMemAlloc_v2(p, n); return r; }
CUresult cuMemAllocFromPoolAsync_ptsz(ptr *p, size_t n, void *pool, void *st) { int r = cuMemAlloc_v2(p, n); return r; }
CUresult cuMemAllocPitch_v2(ptr *p, size_t *pitch, size_t w, size_t h, unsigned e)
{
	*pitch = (w + 511) & ~511ul;
	int r = cuMemAlloc_v2(p, *pitch * h);
	return r;
}
CUresult cuMemCreate(ptr *h, size_t n, const void *prop, unsigned long long f) { *h = next_pointer++; return 0; }
CUresult cuMemFree_v2(ptr p) { return 0; }
CUresult cuMemFreeAsync(ptr p, void *st) { int r = cuMemFree_v2(p); return r; }
CUresult cuMemRelease(ptr h) { return 0; }
CUresult cuLaunchKernel(void *f) { return 0; }
CUresult cuGraphLaunch(void *f, void *st) { return 0; }
