package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a program that runs beside this one: backends or a contender.
type process struct {
	program string
	command *exec.Cmd
	log     string // the file with its output
	admin   string // host:port, where a Go program reports on itself; empty for others
	ended   chan struct{}
}

// start runs a program in a process group of its own, in which stop finds
// whatever it starts itself.
func start(name, dir string, env []string, argv ...string) (*process, error) {
	p := &process{program: name, command: exec.Command(argv[0], argv[1:]...), log: filepath.Join(dir, name+".log"),
		ended: make(chan struct{})}
	output, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer output.Close()
	p.command.Dir = dir
	p.command.Env = append(os.Environ(), env...)
	p.command.Stdout, p.command.Stderr = output, output
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("%s does not start: %w", name, err)
	}
	go func() {
		_ = p.command.Wait()
		close(p.ended)
	}()
	started.Lock()
	defer started.Unlock()
	started.all = append(started.all, p)
	return p, nil
}

// started are all programs that were ever started.
var started struct {
	sync.Mutex
	all []*process
}

// listening waits until the program accepts connections.
func (p *process) listening(address string) error {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if conn, err := net.Dial("tcp", address); err == nil {
			return conn.Close()
		}
		select {
		case <-p.ended:
			return p.failure("ended")
		case <-time.After(50 * time.Millisecond):
		}
	}
	p.stop()
	return p.failure("does not listen at " + address)
}

func (p *process) failure(what string) error {
	output, _ := os.ReadFile(p.log)
	if len(output) > 2000 {
		output = output[len(output)-2000:]
	}
	return fmt.Errorf("%s %s:\n%s", p.program, what, output)
}

// stop ends the program, if it still runs, and all that it started.
func (p *process) stop() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// signal does nothing once the program has ended: its number may be that of
// another one by now.
func (p *process) signal(s syscall.Signal) {
	select {
	case <-p.ended:
	default:
		_ = syscall.Kill(-p.command.Process.Pid, s)
	}
}

// tree lists the ids of the program and of all that it started.
func (p *process) tree() []int {
	pids := []int{p.command.Process.Pid}
	for i := 0; i < len(pids); i++ {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pids[i]))
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for child := range strings.FieldsSeq(string(text)) {
				if pid, err := strconv.Atoi(child); err == nil {
					pids = append(pids, pid)
				}
			}
		}
	}
	return pids
}

// clockTick is the unit of the times in /proc/<pid>/stat: USER_HZ is 100 on
// all of Linux's architectures that Go knows.
const clockTick = 10 * time.Millisecond

// cpu is the time that all of its processes have had of a processor.
func (p *process) cpu() (total time.Duration) {
	for _, pid := range p.tree() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		// The name may hold anything; what follows it does not.
		_, rest, _ := strings.Cut(string(text), ") ")
		if fields := strings.Fields(rest); len(fields) > 12 {
			user, _ := strconv.Atoi(fields[11])
			system, _ := strconv.Atoi(fields[12])
			total += time.Duration(user+system) * clockTick
		}
	}
	return total
}

// resident is the memory of all of its processes, in bytes. What they share is
// counted once.
func (p *process) resident() (total float64) {
	// What Go has collected already is not what it needs.
	if res, err := http.Get("http://" + p.admin + "/debug/pprof/heap?gc=1"); err == nil {
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	for _, pid := range p.tree() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		for line := range strings.Lines(string(text)) {
			if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "Pss:" {
				kilobytes, _ := strconv.Atoi(fields[1])
				total += float64(kilobytes) * 1024
			}
		}
	}
	return total
}

// lastPort is the latest that freePort gave away. It begins anywhere, in case
// another run gives away ports at this time, and stays below those that the
// kernel gives to connections.
var lastPort atomic.Int64

func init() { lastPort.Store(10_000 + rand.Int64N(10_000)) }

// freePort returns a port at which no program listens. None is given away
// twice, for it takes a program a while to listen at its own.
func freePort() int {
	for {
		port := int(lastPort.Add(1))
		if l, err := net.Listen("tcp", ":"+itoa(port)); err == nil {
			l.Close()
			return port
		}
	}
}
