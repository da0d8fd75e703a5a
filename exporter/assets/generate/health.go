package main

// health is a matrix: a row for each GPU, a column for each way in which it can be ill.
func health() *board {
	b := newBoard("health", "GPU health", "A row for each GPU: temperature, power, ECC, Xid and throttling, now and over the last week.", "now-24h", "host", "gpu")
	of := func(metric, more string) string {
		return `max by (` + byDevice + `) (` + metric + `{` + dev + more + `})`
	}
	add(b, trends(panel{title: "Seven days", about: "Last value and course of the week.", width: 24, height: 9}, deviceLabels,
		column{"Temperature", celsius, of("gpu_temperature_celsius", "")},
		column{"Power", watts, of("gpu_power_usage_watts", "")},
		column{"ECC corrected", count, of("gpu_ecc_errors", `,type="volatile",severity="corrected"`)},
		column{"ECC uncorrected", count, of("gpu_ecc_errors", `,type="volatile",severity="uncorrected"`)},
		column{"Slowed down", ratio, `max by (` + byDevice + `) (rate(gpu_throttle_seconds_total{` + dev + `,reason=~"hw_.*|sw_.*"}[$__rate_interval]))`}).
		TimeFrom("7d"))
	add(b, rows(panel{title: "Now", about: "Errors since the driver was loaded; aggregate ECC over the life of the board; Xids of the last week.", width: 24, height: 9}, deviceLabels,
		column{"Answers", count, of("gpu_up", "")},
		column{"Temperature", celsius, of("gpu_temperature_celsius", "")},
		column{"Memory temperature", celsius, of("gpu_memory_temperature_celsius", "")},
		column{"ECC uncorrected", count, of("gpu_ecc_errors", `,type="volatile",severity="uncorrected"`)},
		column{"ECC aggregate", count, `sum by (` + byDevice + `) (gpu_ecc_errors{` + dev + `,type="aggregate"})`},
		column{"Rows remapped", count, `sum by (` + byDevice + `) (gpu_remapped_rows{` + dev + `})`},
		column{"Remap pending", count, of("gpu_row_remap_pending", "")},
		column{"Remap failed", count, of("gpu_row_remap_failure", "")},
		column{"Xids in 7 days", count, `sum by (` + byDevice + `) (increase(gpu_xid_errors_total{` + dev + `}[7d])) or max by (` + byDevice + `) (gpu_up{` + dev + `}) * 0`}))
	b.row("Course")
	add(b, lines(panel{title: "Temperature", about: "Of the GPU; it slows down in the nineties.", unit: celsius, width: 12, height: 8,
		queries: []query{{`gpu_temperature_celsius{` + dev + `}`, perGPU}}}).Thresholds(thresholds(above(85, "orange"), above(95, "red"))))
	add(b, lines(panel{title: "Power", about: "Drawn now.", unit: watts, width: 12, height: 8, queries: []query{{`gpu_power_usage_watts{` + dev + `}`, perGPU}}}))
	add(b, lines(panel{title: "Slowed down", about: "Share of the time in which the GPU was held back, by reason. Idle is no reason to worry.", unit: ratio, width: 12, height: 8,
		queries: []query{{`rate(gpu_throttle_seconds_total{` + dev + `,reason!="gpu_idle"}[$__rate_interval])`, perGPU + " {{reason}}"}}}).Max(1))
	add(b, lines(panel{title: "Xids", about: "Errors that the driver reported, by number, and 0 for a GPU without any.", unit: count, width: 12, height: 8, queries: []query{
		{`sum by (` + byDevice + `, xid) (increase(gpu_xid_errors_total{` + dev + `}[$__rate_interval])) or max by (` + byDevice + `) (gpu_up{` + dev + `}) * 0`, perGPU + " {{xid}}"}}}))
	add(b, lines(panel{title: "SM clock", about: "Lower than usual under load: held back.", unit: hertz, width: 12, height: 8,
		queries: []query{{`gpu_clock_hertz{` + dev + `,domain="sm"}`, perGPU}}}))
	add(b, lines(panel{title: "ECC errors", about: "Volatile: since the driver was loaded.", unit: count, width: 12, height: 8,
		queries: []query{{`gpu_ecc_errors{` + dev + `,type="volatile"}`, perGPU + " {{severity}}"}}}))
	return b
}
