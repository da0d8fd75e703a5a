// Bench measures a running exporter: how long a scrape takes, and what CPU time and memory its processes use while it is scraped once a
// second. It prints one line of a Markdown table. With a command after "--" it starts that command, measures it and its children, and
// ends it; without a URL it makes no scrape. With --hosts it makes hosts of its own, which needs no GPU, and measures the exporter on them.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
)

// Header is the table's head, printed by --header.
const header = `| program | scrape p50 / p99 / max | CPU | RSS | RssAnon | series |
|---|---|---|---|---|---|`

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	name := flag.String("name", "", "first cell of the line")
	url := flag.String("url", "", "URL to scrape")
	seconds := flag.Int("seconds", 60, "length of the measurement")
	warm := flag.Int("warm", 8, "seconds before it")
	head := flag.Bool("header", false, "print the table's head and end")
	exporter := flag.String("hosts", "", "exporter to measure on hosts that are made here")
	scale := flag.String("scale", "", "with --hosts: measure hosts of many sizes too, and draw the figures into this file")
	flag.Parse()
	switch {
	case *head:
		fmt.Println(header)
		return nil
	case *exporter != "":
		return hosts(*exporter, *scale, *warm, *seconds)
	case flag.NArg() == 0:
		return fmt.Errorf("no command to measure")
	}
	cmd := exec.Command(flag.Arg(0), flag.Args()[1:]...)
	cmd.Stderr = os.Stderr
	r, err := measure(cmd, *url, *warm, *seconds)
	if err != nil {
		return err
	}
	fmt.Println(r.line(*name))
	return nil
}
