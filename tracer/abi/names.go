package abi

import (
	"fmt"

	"golang.org/x/sys/unix"
	"strings"
)

// The numbers that the kernel side gives to UVM's two commands outside the table.
const (
	NumberInitialize   = 256
	NumberDeinitialize = 257
)

var rmNames = map[uint32]string{
	0x27: "rm_alloc_memory", 0x28: "rm_alloc_object", 0x29: "rm_free", 0x2a: "rm_control", 0x2b: "rm_alloc",
	0x32: "rm_config_get", 0x33: "rm_config_set", 0x34: "rm_dup_object", 0x35: "rm_share", 0x37: "rm_config_get_ex", 0x38: "rm_config_set_ex",
	0x39: "rm_i2c_access", 0x41: "rm_idle_channels", 0x4a: "rm_vid_heap_control", 0x4d: "rm_access_registry", 0x4e: "rm_map_memory",
	0x4f: "rm_unmap_memory", 0x52: "rm_get_event_data", 0x54: "rm_alloc_context_dma", 0x56: "rm_add_vblank_callback",
	0x57: "rm_map_memory_dma", 0x58: "rm_unmap_memory_dma", 0x59: "rm_bind_context_dma", 0x5c: "rm_export_object_to_fd",
	0x5d: "rm_import_object_from_fd", 0x5e: "rm_update_device_mapping_info", 0x5f: "rm_lockless_diagnostic",
	200: "card_info", 201: "register_fd", 206: "alloc_os_event", 207: "free_os_event", 209: "status_code", 210: "check_version",
	211: "ioctl_xfer", 212: "attach_gpus", 213: "query_device_intr", 214: "sys_params", 215: "numa_info", 216: "set_numa_state",
	217: "export_to_dmabuf", 218: "wait_open_complete",
}

var uvmNames = map[uint32]string{
	NumberInitialize: "uvm_initialize", NumberDeinitialize: "uvm_deinitialize",
	23: "uvm_create_range_group", 24: "uvm_destroy_range_group", 25: "uvm_register_gpu_vaspace", 26: "uvm_unregister_gpu_vaspace",
	27: "uvm_register_channel", 28: "uvm_unregister_channel", 29: "uvm_enable_peer_access", 30: "uvm_disable_peer_access",
	31: "uvm_set_range_group", 33: "uvm_map_external_allocation", 34: "uvm_free", 35: "uvm_mem_map", 37: "uvm_register_gpu",
	38: "uvm_unregister_gpu", 39: "uvm_pageable_mem_access", 40: "uvm_prevent_migration", 41: "uvm_allow_migration",
	42: "uvm_set_preferred_location", 43: "uvm_unset_preferred_location", 44: "uvm_enable_read_duplication",
	45: "uvm_disable_read_duplication", 46: "uvm_set_accessed_by", 47: "uvm_unset_accessed_by", 51: "uvm_migrate",
	53: "uvm_migrate_range_group", 54: "uvm_enable_system_wide_atomics", 55: "uvm_disable_system_wide_atomics",
	65: "uvm_map_dynamic_parallelism_region", 66: "uvm_unmap_external", 68: "uvm_alloc_semaphore_pool",
	69: "uvm_clean_up_zombie_resources", 70: "uvm_pageable_mem_access_on_gpu", 71: "uvm_populate_pageable", 72: "uvm_validate_va_range",
	73: "uvm_create_external_range", 74: "uvm_map_external_sparse", 75: "uvm_mm_initialize", 78: "uvm_alloc_device_p2p",
	79: "uvm_clear_all_access_counters", 80: "uvm_discard",
}

// CallName returns the name of a call number on a kind of node ("gpu", "ctl", "uvm", "caps"): such as "rm_alloc", or "ctl_0x11".
func CallName(node string, number uint32) string {
	names := rmNames
	switch node {
	case "uvm":
		names = uvmNames
	case "caps":
		names = nil
	}
	if name, ok := names[number]; ok {
		return name
	}
	return fmt.Sprintf("%s_0x%x", node, number)
}

var statusNames = map[uint32]string{
	0x03: "busy_retry", 0x0f: "gpu_is_lost", 0x12: "gpu_uuid_not_found", 0x16: "illegal_action", 0x17: "in_use",
	0x1a: "insufficient_resources", 0x1b: "insufficient_permissions", 0x1e: "invalid_address", 0x1f: "invalid_argument",
	0x22: "invalid_class", 0x23: "invalid_client", 0x24: "invalid_command", 0x26: "invalid_device", 0x2e: "invalid_limit",
	0x31: "invalid_object", 0x33: "invalid_object_handle", 0x36: "invalid_object_parent", 0x40: "invalid_state",
	0x4d: "more_processing_required", 0x4f: "no_free_fifos", 0x51: "no_memory", 0x55: "not_ready", 0x56: "not_supported",
	0x57: "object_not_found", 0x59: "operating_system", 0x5d: "page_table_not_avail", 0x60: "rc_error", 0x62: "reset_required",
	0x63: "state_in_use", 0x65: "timeout", 0x68: "uvm_address_in_use", 0x6a: "lib_rm_version_mismatch", 0x71: "fatal_error",
	0x72: "memory_error", 0x7a: "fabric_manager_not_present", 0x81: "nvlink_fabric_not_ready", 0xffff: "generic",
}

// StatusName returns the name of a call's outcome: an NV_STATUS, or a negative errno. Statuses without a name are "other": the word is in the
// caller's memory, so it can be anything.
func StatusName(status int32) string {
	if status < 0 {
		return ErrnoName(status)
	}
	if name, ok := statusNames[uint32(status)]; ok {
		return name
	}
	return "other"
}

// ErrnoName returns the name of a system call's result, zero or a negative errno, in lower case: "ok", "eperm".
func ErrnoName(result int32) string {
	if result >= 0 {
		return "ok"
	}
	if name := unix.ErrnoName(unix.Errno(-int64(result))); name != "" {
		return strings.ToLower(name)
	}
	return "other"
}
