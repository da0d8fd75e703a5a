package probes

// hook is one program on one group of libcuda exports.
type hook struct {
	program string
	result  bool // also needs the return
	symbols []string
}

// hooks lists every probed export. Left out on purpose: device to device and peer copies (they need not cross PCIe to the host), memset,
// array copies (cuMemcpyAtoH, HtoA: legacy, without a form that tools use), cuMemcpyBatchAsync and cuMemcpy3DBatchAsync (their pieces
// would have to be read in a loop without bound), host allocations, and the unversioned 32-bit leftovers of the first CUDA releases.
// cuGetProcAddress returns the addresses of these same exports, so the runtime library passes through them too.
var hooks = []hook{
	{program: "copy_htod", symbols: []string{"cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz"}},
	{program: "copy_dtoh", symbols: []string{"cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2_ptsz"}},
	{program: "copy_unified", symbols: []string{"cuMemcpy", "cuMemcpy_ptds", "cuMemcpyAsync", "cuMemcpyAsync_ptsz"}},
	{program: "copy_2d", symbols: []string{
		"cuMemcpy2D_v2", "cuMemcpy2D_v2_ptds", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DUnaligned_v2_ptds", "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2_ptsz",
	}},
	{program: "copy_3d", symbols: []string{"cuMemcpy3D_v2", "cuMemcpy3D_v2_ptds", "cuMemcpy3DAsync_v2", "cuMemcpy3DAsync_v2_ptsz"}},
	{program: "alloc", result: true, symbols: []string{
		"cuMemAlloc_v2", "cuMemAllocAsync", "cuMemAllocAsync_ptsz", "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz",
	}},
	{program: "alloc_managed", result: true, symbols: []string{"cuMemAllocManaged"}},
	{program: "alloc_pitch", result: true, symbols: []string{"cuMemAllocPitch_v2"}},
	{program: "alloc_create", result: true, symbols: []string{"cuMemCreate"}},
	{program: "free_pointer", symbols: []string{"cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz"}},
	{program: "free_handle", symbols: []string{"cuMemRelease"}},
}

var launchHook = hook{program: "launch", symbols: []string{
	"cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz", "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz",
	"cuGraphLaunch", "cuGraphLaunch_ptsz",
}}
