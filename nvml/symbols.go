package nvml

// function is one NVML entry point as this package calls it. A function that exists in several versions has one entry; the newest
// version that the library has is bound, and its version decides the struct's layout.
type function int

const (
	fnInit function = iota
	fnShutdown
	fnSystemGetDriverVersion
	fnSystemGetNVMLVersion
	fnSystemGetCudaDriverVersion
	fnDeviceGetCount
	fnDeviceGetHandleByIndex
	fnDeviceGetUUID
	fnDeviceGetName
	fnDeviceGetPciInfo
	fnDeviceGetMinorNumber
	fnDeviceGetSerial
	fnDeviceGetVbiosVersion
	fnDeviceGetArchitecture
	fnDeviceGetCudaComputeCapability
	fnDeviceGetPersistenceMode
	fnDeviceGetComputeMode
	fnDeviceGetMemoryInfoV2
	fnDeviceGetMemoryInfo
	fnDeviceGetBAR1MemoryInfo
	fnDeviceGetUtilizationRates
	fnDeviceGetEncoderUtilization
	fnDeviceGetDecoderUtilization
	fnDeviceGetJpgUtilization
	fnDeviceGetOfaUtilization
	fnDeviceGetTemperature
	fnDeviceGetTemperatureThreshold
	fnDeviceGetPowerUsage
	fnDeviceGetEnforcedPowerLimit
	fnDeviceGetPowerManagementLimitConstraints
	fnDeviceGetTotalEnergyConsumption
	fnDeviceGetClockInfo
	fnDeviceGetMaxClockInfo
	fnDeviceGetPerformanceState
	fnDeviceGetCurrentClocksEventReasons
	fnDeviceGetViolationStatus
	fnDeviceGetComputeRunningProcesses
	fnDeviceGetGraphicsRunningProcesses
	fnDeviceGetProcessUtilization
	fnDeviceGetSamples
	fnDeviceGetFieldValues
	fnDeviceGetTotalEccErrors
	fnDeviceGetRetiredPages
	fnDeviceGetRetiredPagesPendingStatus
	fnDeviceGetRemappedRows
	fnDeviceGetNumFans
	fnDeviceGetFanSpeedV2
	fnDeviceGetCurrPcieLinkGeneration
	fnDeviceGetCurrPcieLinkWidth
	fnDeviceGetMaxPcieLinkGeneration
	fnDeviceGetMaxPcieLinkWidth
	fnDeviceGetPcieReplayCounter
	fnDeviceGetPcieThroughput
	fnDeviceGetEncoderStats
	fnDeviceGetNvLinkState
	fnDeviceGetNvLinkErrorCounter
	fnDeviceGetMigMode
	fnDeviceGetMaxMigDeviceCount
	fnDeviceGetMigDeviceHandleByIndex
	fnDeviceGetGpuInstanceId
	fnDeviceGetComputeInstanceId
	fnDeviceGetAttributes
	fnEventSetCreate
	fnEventSetFree
	fnDeviceRegisterEvents
	fnDeviceGetSupportedEventTypes
	fnEventSetWait
	fnGpmSampleAlloc
	fnGpmSampleFree
	fnGpmSampleGet
	fnGpmMetricsGet
	fnGpmQueryDeviceSupport
	numFunctions
)

// symbols lists, newest first, the exported names under which a function may be found. The version of a name is its place counted
// from the end: the last is version 1.
var symbols = [numFunctions][]string{
	fnInit:                                     {"nvmlInit_v2", "nvmlInit"},
	fnShutdown:                                 {"nvmlShutdown"},
	fnSystemGetDriverVersion:                   {"nvmlSystemGetDriverVersion"},
	fnSystemGetNVMLVersion:                     {"nvmlSystemGetNVMLVersion"},
	fnSystemGetCudaDriverVersion:               {"nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"},
	fnDeviceGetCount:                           {"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	fnDeviceGetHandleByIndex:                   {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
	fnDeviceGetUUID:                            {"nvmlDeviceGetUUID"},
	fnDeviceGetName:                            {"nvmlDeviceGetName"},
	fnDeviceGetPciInfo:                         {"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo"},
	fnDeviceGetMinorNumber:                     {"nvmlDeviceGetMinorNumber"},
	fnDeviceGetSerial:                          {"nvmlDeviceGetSerial"},
	fnDeviceGetVbiosVersion:                    {"nvmlDeviceGetVbiosVersion"},
	fnDeviceGetArchitecture:                    {"nvmlDeviceGetArchitecture"},
	fnDeviceGetCudaComputeCapability:           {"nvmlDeviceGetCudaComputeCapability"},
	fnDeviceGetPersistenceMode:                 {"nvmlDeviceGetPersistenceMode"},
	fnDeviceGetComputeMode:                     {"nvmlDeviceGetComputeMode"},
	fnDeviceGetMemoryInfoV2:                    {"nvmlDeviceGetMemoryInfo_v2"},
	fnDeviceGetMemoryInfo:                      {"nvmlDeviceGetMemoryInfo"},
	fnDeviceGetBAR1MemoryInfo:                  {"nvmlDeviceGetBAR1MemoryInfo"},
	fnDeviceGetUtilizationRates:                {"nvmlDeviceGetUtilizationRates"},
	fnDeviceGetEncoderUtilization:              {"nvmlDeviceGetEncoderUtilization"},
	fnDeviceGetDecoderUtilization:              {"nvmlDeviceGetDecoderUtilization"},
	fnDeviceGetJpgUtilization:                  {"nvmlDeviceGetJpgUtilization"},
	fnDeviceGetOfaUtilization:                  {"nvmlDeviceGetOfaUtilization"},
	fnDeviceGetTemperature:                     {"nvmlDeviceGetTemperature"},
	fnDeviceGetTemperatureThreshold:            {"nvmlDeviceGetTemperatureThreshold"},
	fnDeviceGetPowerUsage:                      {"nvmlDeviceGetPowerUsage"},
	fnDeviceGetEnforcedPowerLimit:              {"nvmlDeviceGetEnforcedPowerLimit"},
	fnDeviceGetPowerManagementLimitConstraints: {"nvmlDeviceGetPowerManagementLimitConstraints"},
	fnDeviceGetTotalEnergyConsumption:          {"nvmlDeviceGetTotalEnergyConsumption"},
	fnDeviceGetClockInfo:                       {"nvmlDeviceGetClockInfo"},
	fnDeviceGetMaxClockInfo:                    {"nvmlDeviceGetMaxClockInfo"},
	fnDeviceGetPerformanceState:                {"nvmlDeviceGetPerformanceState"},
	fnDeviceGetCurrentClocksEventReasons:       {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"},
	fnDeviceGetViolationStatus:                 {"nvmlDeviceGetViolationStatus"},
	fnDeviceGetComputeRunningProcesses: {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2",
		"nvmlDeviceGetComputeRunningProcesses"},
	fnDeviceGetGraphicsRunningProcesses: {"nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2",
		"nvmlDeviceGetGraphicsRunningProcesses"},
	fnDeviceGetProcessUtilization:        {"nvmlDeviceGetProcessUtilization"},
	fnDeviceGetSamples:                   {"nvmlDeviceGetSamples"},
	fnDeviceGetFieldValues:               {"nvmlDeviceGetFieldValues"},
	fnDeviceGetTotalEccErrors:            {"nvmlDeviceGetTotalEccErrors"},
	fnDeviceGetRetiredPages:              {"nvmlDeviceGetRetiredPages"},
	fnDeviceGetRetiredPagesPendingStatus: {"nvmlDeviceGetRetiredPagesPendingStatus"},
	fnDeviceGetRemappedRows:              {"nvmlDeviceGetRemappedRows"},
	fnDeviceGetNumFans:                   {"nvmlDeviceGetNumFans"},
	fnDeviceGetFanSpeedV2:                {"nvmlDeviceGetFanSpeed_v2"},
	fnDeviceGetCurrPcieLinkGeneration:    {"nvmlDeviceGetCurrPcieLinkGeneration"},
	fnDeviceGetCurrPcieLinkWidth:         {"nvmlDeviceGetCurrPcieLinkWidth"},
	fnDeviceGetMaxPcieLinkGeneration:     {"nvmlDeviceGetMaxPcieLinkGeneration"},
	fnDeviceGetMaxPcieLinkWidth:          {"nvmlDeviceGetMaxPcieLinkWidth"},
	fnDeviceGetPcieReplayCounter:         {"nvmlDeviceGetPcieReplayCounter"},
	fnDeviceGetPcieThroughput:            {"nvmlDeviceGetPcieThroughput"},
	fnDeviceGetEncoderStats:              {"nvmlDeviceGetEncoderStats"},
	fnDeviceGetNvLinkState:               {"nvmlDeviceGetNvLinkState"},
	fnDeviceGetNvLinkErrorCounter:        {"nvmlDeviceGetNvLinkErrorCounter"},
	fnDeviceGetMigMode:                   {"nvmlDeviceGetMigMode"},
	fnDeviceGetMaxMigDeviceCount:         {"nvmlDeviceGetMaxMigDeviceCount"},
	fnDeviceGetMigDeviceHandleByIndex:    {"nvmlDeviceGetMigDeviceHandleByIndex"},
	fnDeviceGetGpuInstanceId:             {"nvmlDeviceGetGpuInstanceId"},
	fnDeviceGetComputeInstanceId:         {"nvmlDeviceGetComputeInstanceId"},
	fnDeviceGetAttributes:                {"nvmlDeviceGetAttributes_v2"},
	fnEventSetCreate:                     {"nvmlEventSetCreate"},
	fnEventSetFree:                       {"nvmlEventSetFree"},
	fnDeviceRegisterEvents:               {"nvmlDeviceRegisterEvents"},
	fnDeviceGetSupportedEventTypes:       {"nvmlDeviceGetSupportedEventTypes"},
	fnEventSetWait:                       {"nvmlEventSetWait_v2", "nvmlEventSetWait"},
	fnGpmSampleAlloc:                     {"nvmlGpmSampleAlloc"},
	fnGpmSampleFree:                      {"nvmlGpmSampleFree"},
	fnGpmSampleGet:                       {"nvmlGpmSampleGet"},
	fnGpmMetricsGet:                      {"nvmlGpmMetricsGet"},
	fnGpmQueryDeviceSupport:              {"nvmlGpmQueryDeviceSupport"},
}
