package main

// deviceLabels and containerLabels are the leading columns of tables.
var (
	deviceLabels    = [][2]string{{"host_ip", "Host"}, {"gpu_device_name", "GPU"}, {"gpu_pci_bus_id", "PCI"}, {"gpu_device_uuid", "UUID"}}
	containerLabels = [][2]string{{"host_ip", "Host"}, {"gpu_device_name", "GPU"}, {"gpu_device_uuid", "UUID"}, {"container_name", "Container"},
		{"container_id", "Container ID"}, {"image_name", "Image"}}
)

const (
	byDevice    = "host_ip, gpu_device_name, gpu_pci_bus_id, gpu_device_uuid"
	byContainer = "host_ip, gpu_device_name, gpu_device_uuid, container_name, container_id, image_name"
)

func sum(metric string) func(by, selector string) string {
	return func(by, selector string) string { return "sum by (" + by + ") (" + metric + "{" + selector + "})" }
}

func rated(metric string) func(by, selector string) string {
	return func(by, selector string) string { return rate(by, metric, selector) }
}

// host is one host: its GPUs, what is on each, and who works.
func host() *board {
	b := newBoard("host", "GPU host", "One host: its GPUs, the containers on each, who holds memory and who uses SM time.", "now-1h", "host", "gpu", "container", "instance")
	one := func(title, about, unit, expr string) panel {
		return panel{title: title, about: about, unit: unit, width: 4, height: 4, queries: []query{{expr, title}}}
	}
	add(b, number(one("GPUs", "GPUs that the host has had since the exporter started.", count, `count(gpu_up{`+dev+`})`)))
	add(b, number(one("Lost GPUs", "GPUs that do not answer.", count, `count(gpu_up{`+dev+`}) - sum(gpu_up{`+dev+`})`), above(1, "red")))
	add(b, number(one("Containers on GPUs", "Containers with a process on a GPU.", count,
		`count(group by (host_ip, container_id) (gpu_container_processes{`+dev+`} > 0)) or vector(0)`)))
	add(b, number(one("Utilisation", "Mean of the GPUs.", percent, `avg(gpu_device_utilization_percent{`+dev+`})`)))
	add(b, number(one("Memory used", "Of all GPUs together.", ratio,
		`sum(gpu_device_memory_used_bytes{`+dev+`}) / sum(gpu_device_memory_total_bytes{`+dev+`})`), above(0.9, "red")))
	add(b, number(one("Power", "Of all GPUs together.", watts, `sum(gpu_power_usage_watts{`+dev+`})`)))

	add(b, rows(panel{title: "GPUs", about: "Each GPU now.", width: 24, height: 6}, deviceLabels,
		column{"Utilisation", percent, `sum by (` + byDevice + `) (gpu_device_utilization_percent{` + dev + `})`},
		column{"Memory used", bytes, `sum by (` + byDevice + `) (gpu_device_memory_used_bytes{` + dev + `})`},
		column{"Memory", bytes, `sum by (` + byDevice + `) (gpu_device_memory_total_bytes{` + dev + `})`},
		column{"Power", watts, `sum by (` + byDevice + `) (gpu_power_usage_watts{` + dev + `})`},
		column{"Temperature", celsius, `sum by (` + byDevice + `) (gpu_temperature_celsius{` + dev + `})`},
		column{"Containers", count, `sum by (` + byDevice + `) (gpu_containers{` + dev + `})`}))
	add(b, rows(panel{title: "Containers on each GPU", about: "Every container with a process on a GPU, now.", width: 24, height: 8}, containerLabels,
		column{"SM time", percent, `sum by (` + byContainer + `) (gpu_utilization_percent{` + work + `,container_id!=""})`},
		column{"Highest", percent, `max by (` + byContainer + `) (gpu_utilization_max_percent{` + work + `,container_id!=""})`},
		column{"Memory", bytes, `sum by (` + byContainer + `) (gpu_memory_used_bytes{` + work + `,container_id!=""})`},
		column{"Power", watts, rate(byContainer, "gpu_energy_joules_total", work+`,container_id!=""`)},
		column{"CPUs", count, rate(byContainer, "gpu_process_cpu_seconds_total", work+`,container_id!=""`)},
		column{"Processes", count, `count by (` + byContainer + `) (gpu_process_info{` + work + `,container_id!=""})`}))

	b.row("Memory: who holds it")
	memory := panel{title: "Memory of $gpu", unit: bytes, width: 12, height: 9,
		about:   "The parts add up to what the GPU says is used, to the byte. Unattributed is what no process accounts for: the driver, managed memory.",
		queries: append(parts(sum("gpu_memory_used_bytes"), dev), query{`sum(gpu_device_memory_total_bytes{` + dev + `})`, "capacity"})}
	add(b, limit(stacked(memory), "capacity").Repeat("gpu").RepeatDirection("h").MaxPerRow(2))

	b.row("SM time and energy: who uses it")
	add(b, stacked(panel{title: "SM time", about: "GPUs' worth of SM time of each container: 1 is one GPU busy all the time.", unit: count, width: 12, height: 9,
		queries: parts(rated("gpu_busy_seconds_total"), dev)[:2]}))
	add(b, limit(stacked(panel{title: "Power", about: "The GPUs' energy shared out by SM time; what is used while idle is unattributed.", unit: watts, width: 12, height: 9,
		queries: append(parts(rated("gpu_energy_joules_total"), dev), query{`sum(gpu_power_limit_watts{` + dev + `})`, "limit"})}), "limit"))
	add(b, lines(panel{title: "Utilisation by GPU", about: "Mean between two readings.", unit: percent, width: 12, height: 8,
		queries: []query{{`gpu_device_utilization_percent{` + dev + `}`, perGPU}}}).Max(100))
	add(b, spread(panel{title: "Samples of utilisation", about: "Every sample that the driver took, five a second: no spike falls between two scrapes.", unit: percent,
		width: 12, height: 8, queries: []query{{`sum by (le) (increase(gpu_device_utilization_sample_percent_bucket{` + dev + `}[$__rate_interval]))`, "{{le}}"}}}))
	byProcess := byContainer + ", process_pid, process_name"
	named := ` * on (host_ip, gpu_device_uuid, process_pid) group_left (process_name) max by (host_ip, gpu_device_uuid, process_pid, process_name) (gpu_process_info{` + dev + `})`
	add(b, rows(panel{title: "Processes", about: "The twenty that hold most memory.", width: 24, height: 8},
		append(containerLabels[:len(containerLabels):len(containerLabels)], [2]string{"process_pid", "PID"}, [2]string{"process_name", "Program"}),
		column{"Memory", bytes, `topk(20, sum by (` + byProcess + `) (gpu_memory_used_bytes{` + work + `,process_pid!=""}` + named + `))`},
		column{"SM time", percent, `sum by (` + byProcess + `) (gpu_utilization_percent{` + work + `}` + named + `)`}))

	b.row("What the kernel saw (needs the tracer)")
	add(b, lines(panel{title: "Refused opens", about: "Opens of NVIDIA nodes that failed: a container that has lost its device rules.", unit: perSecond, width: 8, height: 8,
		queries: []query{{rate("container_name, node, result", "gpu_device_opens_total", cont+`,result!="ok"`), "{{container_name}} {{node}} {{result}}"}}}))
	add(b, lines(panel{title: "Failed requests of memory", about: "One for each that a program saw fail.", unit: perSecond, width: 8, height: 8,
		queries: []query{{rate("container_name, gpu_device_uuid", "gpu_allocation_failures_total", work), "{{container_name}} {{gpu_device_uuid}}"}}}))
	add(b, lines(panel{title: "Driver calls", about: "System calls into the driver, by container.", unit: perSecond, width: 8, height: 8,
		queries: []query{{rate("container_name", "gpu_driver_calls_total", cont), "{{container_name}}"}}}))

	b.row("The exporter itself")
	const own = `{instance=~"$instance"}`
	add(b, lines(panel{title: "Sources", about: "1 while the source answers.", unit: count, width: 8, height: 6, queries: []query{
		{`gpu_exporter_nvml_up` + own, "NVML {{instance}}"}, {`gpu_exporter_docker_up` + own, "Docker {{instance}}"},
		{`max by (instance, mode) (gpu_exporter_tracer_up` + own + `)`, "tracer {{instance}} {{mode}}"}}}))
	add(b, lines(panel{title: "Age of the snapshot", about: "Above 5 s the exporter is not ready.", unit: seconds, width: 8, height: 6, queries: []query{
		{`gpu_exporter_snapshot_age_seconds` + own, "{{instance}}"}}}))
	add(b, lines(panel{title: "Series", about: "Series of a scrape.", unit: count, width: 8, height: 6, queries: []query{
		{`gpu_exporter_series` + own, "{{instance}}"}}}))
	return b
}
