package main

// fleet is many hosts, from the recording rules alone: it costs the same with one process on a GPU or with a thousand.
func fleet() *board {
	b := newBoard("fleet", "GPU fleet", "Many hosts: what is assigned against what is used, and who it costs. Needs rules/gpu-exporter.rules.yaml.", "now-24h", "host")
	const in = `{host_ip=~"$host"}`
	one := func(title, about, unit, expr string) panel {
		return panel{title: title, about: about, unit: unit, width: 4, height: 4, queries: []query{{expr, title}}}
	}
	add(b, number(one("Hosts", "With a GPU.", count, `count(host:gpus:count`+in+`)`)))
	add(b, number(one("GPUs", "Of all hosts.", count, `sum(host:gpus:count`+in+`)`)))
	add(b, number(one("Assigned", "GPUs that a container may use.", count, `sum(host:gpus_assigned:count`+in+`)`)))
	add(b, number(one("Busy", "GPUs with more than 5 % utilisation in five minutes.", count, `sum(host:gpus_busy:count`+in+`)`)))
	add(b, number(one("Assigned but idle", "Assigned, and under 1 % for an hour.", count, `sum(host:gpus_assigned_idle:count`+in+`)`), above(1, "orange")))
	add(b, number(one("Power", "Of all GPUs.", watts, `sum(host:gpu_power_watts:sum`+in+`)`)))
	add(b, lines(panel{title: "Assigned against used", about: "The distance between the lines is what could be given to others.", unit: count, width: 12, height: 9, queries: []query{
		{`sum(host:gpus:count` + in + `)`, "GPUs"}, {`sum(host:gpus_assigned:count` + in + `)`, "assigned"}, {`sum(host:gpus_busy:count` + in + `)`, "busy"},
		{`sum(gpu:busy:ratio_avg5m` + in + `)`, "used, in whole GPUs"}}}))
	add(b, lines(panel{title: "Power by host", about: "Of all GPUs of the host.", unit: watts, width: 12, height: 9,
		queries: []query{{`host:gpu_power_watts:sum` + in, "{{host_ip}}"}}}))
	add(b, rows(panel{title: "Hosts", about: "Each host now.", width: 12, height: 9}, [][2]string{{"host_ip", "Host"}},
		column{"GPUs", count, `sum by (host_ip) (host:gpus:count` + in + `)`},
		column{"Assigned", count, `sum by (host_ip) (host:gpus_assigned:count` + in + `)`},
		column{"Busy", count, `sum by (host_ip) (host:gpus_busy:count` + in + `)`},
		column{"Assigned but idle", count, `sum by (host_ip) (host:gpus_assigned_idle:count` + in + `)`},
		column{"Memory used", ratio, `avg by (host_ip) (gpu:memory_used:ratio` + in + `)`},
		column{"Power", watts, `sum by (host_ip) (host:gpu_power_watts:sum` + in + `)`}))
	const project = "image_name, compose_project, namespace"
	add(b, rows(panel{title: "Cost by image and project", about: "Of the time range shown, containers only. A GPU that several containers share is assigned to each.", width: 12, height: 9},
		[][2]string{{"image_name", "Image"}, {"compose_project", "Compose project"}, {"namespace", "Namespace"}},
		column{"GPU hours assigned", hours, `sum by (` + project + `) (sum_over_time(project:gpus_assigned:sum[$__range:1m])) / 60`},
		column{"GPU hours used", hours, `sum by (` + project + `) (sum_over_time(project:gpus_busy:sum_rate5m[$__range:1m])) / 60`},
		column{"Energy", joules, `sum by (` + project + `) (sum_over_time(project:gpu_power_watts:sum_rate5m[$__range:1m])) * 60`}))
	add(b, ranking(panel{title: "Busiest containers", about: "SM time in GPUs' worth.", unit: count, width: 12, height: 9, queries: []query{
		{`topk(10, sum by (host_ip, container_name, image_name) (container:gpu_busy:ratio_rate5m{host_ip=~"$host",container_id!=""}))`, "{{container_name}} ({{image_name}}) {{host_ip}}"}}}))
	add(b, lines(panel{title: "Busiest links", about: "Share of the PCIe link, the ten highest.", unit: ratio, width: 12, height: 9, queries: []query{
		{`topk(10, gpu:pcie_used:ratio_rate5m` + in + `)`, "{{host_ip}} {{gpu_device_uuid}} {{direction}}"}}}))
	return b
}
