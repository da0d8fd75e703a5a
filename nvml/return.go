package nvml

import "strconv"

// Return is nvmlReturn_t, the result of every NVML call. Every value but Success is an error; compare with errors.Is.
type Return uint32

// The NVML return codes (nvmlReturn_enum).
const (
	Success                  Return = 0
	ErrUninitialized         Return = 1
	ErrInvalidArgument       Return = 2
	ErrNotSupported          Return = 3
	ErrNoPermission          Return = 4
	ErrAlreadyInitialized    Return = 5
	ErrNotFound              Return = 6
	ErrInsufficientSize      Return = 7
	ErrInsufficientPower     Return = 8
	ErrDriverNotLoaded       Return = 9
	ErrTimeout               Return = 10
	ErrIRQIssue              Return = 11
	ErrLibraryNotFound       Return = 12
	ErrFunctionNotFound      Return = 13
	ErrCorruptedInforom      Return = 14
	ErrGPUIsLost             Return = 15
	ErrResetRequired         Return = 16
	ErrOperatingSystem       Return = 17
	ErrLibRMVersionMismatch  Return = 18
	ErrInUse                 Return = 19
	ErrMemory                Return = 20
	ErrNoData                Return = 21
	ErrVGPUECCNotSupported   Return = 22
	ErrInsufficientResources Return = 23
	ErrFreqNotSupported      Return = 24
	ErrArgumentVersion       Return = 25
	ErrDeprecated            Return = 26
	ErrNotReady              Return = 27
	ErrGPUNotFound           Return = 28
	ErrInvalidState          Return = 29
	ErrResetTypeNotSupported Return = 30
	ErrUnknown               Return = 999
)

// ErrNoValue says that the call succeeded and its answer was a sentinel ("not available") or impossible. It is never returned
// by NVML itself.
const ErrNoValue Return = 1 << 31

var returnNames = map[Return]string{
	Success: "SUCCESS", ErrUninitialized: "UNINITIALIZED", ErrInvalidArgument: "INVALID_ARGUMENT", ErrNotSupported: "NOT_SUPPORTED",
	ErrNoPermission: "NO_PERMISSION", ErrAlreadyInitialized: "ALREADY_INITIALIZED", ErrNotFound: "NOT_FOUND",
	ErrInsufficientSize: "INSUFFICIENT_SIZE", ErrInsufficientPower: "INSUFFICIENT_POWER", ErrDriverNotLoaded: "DRIVER_NOT_LOADED",
	ErrTimeout: "TIMEOUT", ErrIRQIssue: "IRQ_ISSUE", ErrLibraryNotFound: "LIBRARY_NOT_FOUND", ErrFunctionNotFound: "FUNCTION_NOT_FOUND",
	ErrCorruptedInforom: "CORRUPTED_INFOROM", ErrGPUIsLost: "GPU_IS_LOST", ErrResetRequired: "RESET_REQUIRED",
	ErrOperatingSystem: "OPERATING_SYSTEM", ErrLibRMVersionMismatch: "LIB_RM_VERSION_MISMATCH", ErrInUse: "IN_USE", ErrMemory: "MEMORY",
	ErrNoData: "NO_DATA", ErrVGPUECCNotSupported: "VGPU_ECC_NOT_SUPPORTED", ErrInsufficientResources: "INSUFFICIENT_RESOURCES",
	ErrFreqNotSupported: "FREQ_NOT_SUPPORTED", ErrArgumentVersion: "ARGUMENT_VERSION_MISMATCH", ErrDeprecated: "DEPRECATED",
	ErrNotReady: "NOT_READY", ErrGPUNotFound: "GPU_NOT_FOUND", ErrInvalidState: "INVALID_STATE",
	ErrResetTypeNotSupported: "RESET_TYPE_NOT_SUPPORTED", ErrUnknown: "UNKNOWN", ErrNoValue: "NO_VALUE",
}

// Name returns NVML's name of the code without its prefix, such as "GPU_IS_LOST".
func (r Return) Name() string {
	if n, ok := returnNames[r]; ok {
		return n
	}
	return "CODE_" + strconv.FormatUint(uint64(r), 10)
}

// Error implements error.
func (r Return) Error() string { return "nvml: " + r.Name() }

// err turns a return code into an error, nil for success.
func (r Return) err() error {
	if r == Success {
		return nil
	}
	return r
}
