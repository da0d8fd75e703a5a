// SPDX-License-Identifier: GPL-2.0
// The driver's tracepoint nvidia:nvidia_dev_xid, with the fields that the driver gives it.
#undef TRACE_SYSTEM
#define TRACE_SYSTEM nvidia
#if !defined(NVIDIA_XID_H) || defined(TRACE_HEADER_MULTI_READ)
#define NVIDIA_XID_H
#include <linux/tracepoint.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0)
#define assign(to, from) __assign_str(to)
#else
#define assign(to, from) __assign_str(to, from)
#endif

TRACE_EVENT(nvidia_dev_xid,
	TP_PROTO(const char *device, u32 code, const char *text),
	TP_ARGS(device, code, text),
	TP_STRUCT__entry(
		__string(dev, device)
		__field(u32, error_code)
		__string(msg, text)
	),
	TP_fast_assign(
		assign(dev, device);
		assign(msg, text);
		__entry->error_code = code;
	),
	TP_printk("Xid (PCI:%s): %u, %s", __get_str(dev), __entry->error_code, __get_str(msg))
);
#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE nvidia_xid
#include <trace/define_trace.h>
