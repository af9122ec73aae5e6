package regions

import (
	"context"
	"errors"
	"sync"
	"time"
)

// line is the queue of messages for one server. Its items are sent in order,
// and all that wait are sent together, so that a server that is far away gets
// as much as the near one. What waits for longer than maxWait is dropped: the
// server cannot be reached, and gets what it lacks when it is back.
type line[T any] struct {
	// send sends items, which have waited for so long. It returns the indexes
	// of those that failed.
	send func(ctx context.Context, items []T, waited time.Duration) (failed []int, err error)

	mu   sync.Mutex
	jobs []job[T]
	busy bool
	// running are the goroutines that send: one while there are jobs.
	running sync.WaitGroup
	// life ends when the line is closed.
	life context.Context
	end  context.CancelFunc
}

type job[T any] struct {
	items []T
	since time.Time
	done  chan<- result
}

// result is how a job ended: which of its items failed, and why the first of
// them did.
type result struct {
	failed []int
	err    error
}

const (
	// patience is how long a server has for anything that it is told or asked.
	patience = time.Second
	maxWait  = 5 * time.Second
	// maxItems is how many items are sent together, unless one job has more.
	maxItems = 512
	// maxJobs is how many jobs wait.
	maxJobs = 1024
)

var errBehind = errors.New("too much waits to be sent to the server")

func newLine[T any](send func(ctx context.Context, items []T, waited time.Duration) ([]int, error)) *line[T] {
	l := &line[T]{send: send}
	l.life, l.end = context.WithCancel(context.Background())
	return l
}

// add makes the server be told the items. The result goes to done, which has
// room for it.
func (l *line[T]) add(items []T, done chan<- result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.jobs) == maxJobs {
		l.jobs[0].done <- result{all(l.jobs[0].items), errBehind}
		l.jobs = l.jobs[1:]
	}
	l.jobs = append(l.jobs, job[T]{items, time.Now(), done})
	if !l.busy {
		l.busy = true
		l.running.Go(l.run)
	}
}

func (l *line[T]) run() {
	for {
		jobs := l.next()
		if jobs == nil {
			return
		}
		var items []T
		for _, j := range jobs {
			items = append(items, j.items...)
		}
		waited := time.Since(jobs[0].since)
		var failed []int
		err := errBehind
		if waited < maxWait {
			ctx, cancel := context.WithTimeout(l.life, patience)
			failed, err = l.send(ctx, items, waited)
			cancel()
		} else {
			failed = all(items)
		}
		for _, j := range jobs {
			r := result{err: err}
			for len(failed) > 0 && failed[0] < len(j.items) {
				r.failed, failed = append(r.failed, failed[0]), failed[1:]
			}
			for i := range failed {
				failed[i] -= len(j.items)
			}
			j.done <- r
		}
	}
}

// next returns the jobs that are sent together, or nil if there are none.
func (l *line[T]) next() (jobs []job[T]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for len(l.jobs) > 0 && (jobs == nil || n+len(l.jobs[0].items) <= maxItems) {
		n += len(l.jobs[0].items)
		jobs, l.jobs = append(jobs, l.jobs[0]), l.jobs[1:]
	}
	l.busy = jobs != nil
	return jobs
}

// close waits until everything is sent, for a short time.
func (l *line[T]) close() {
	defer time.AfterFunc(patience, l.end).Stop()
	l.running.Wait()
	l.end()
}

// all returns the indexes of all items.
func all[T any](items []T) []int {
	indexes := make([]int, len(items))
	for i := range indexes {
		indexes[i] = i
	}
	return indexes
}
