// SPDX-License-Identifier: GPL-2.0
// A module with NVIDIA's tracepoint for Xids, for scripts/test-vm: what is written to /proc/nvidia_xid, "device|code|text", is reported.
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#define CREATE_TRACE_POINTS
#include "nvidia_xid.h"

static ssize_t report(struct file *file, const char __user *from, size_t n, loff_t *at)
{
	char *line = memdup_user_nul(from, n), *rest = line, *device, *code;
	u32 number;
	int err = -EINVAL;

	if (IS_ERR(line))
		return PTR_ERR(line);
	device = strsep(&rest, "|");
	code = strsep(&rest, "|");
	if (code && rest && !kstrtou32(code, 10, &number)) {
		trace_nvidia_dev_xid(device, number, rest);
		err = 0;
	}
	kfree(line);
	return err ? err : n;
}

static const struct proc_ops ops = { .proc_write = report };

static int __init begin(void)
{
	return proc_create("nvidia_xid", 0200, NULL, &ops) ? 0 : -ENOMEM;
}

static void __exit end(void)
{
	remove_proc_entry("nvidia_xid", NULL);
}

module_init(begin);
module_exit(end);
MODULE_LICENSE("GPL");
