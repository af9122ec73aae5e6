package sse

// Undecided reports whether nothing so far is content. An event that has not
// ended counts as none while it has at most limit bytes, or if it says what it
// is: the first events of a response repeat its instructions, which may be
// long, and so does the event of one that has failed.
func (w *Watcher) Undecided(limit int) bool {
	s := &w.splitter
	if w.Opening != Preamble {
		return false
	}
	if s.Unfinished() <= limit {
		return true
	}
	line, _ := cutField(s.partial.text, "data")
	for _, data := range [][]byte{s.data, line} {
		e := Event{Name: s.name[:s.named], Data: data}
		if isPreamble(e.Kind()) || e.mayBeLongError() {
			return true
		}
	}
	return false
}

// mayBeLongError reports whether the event, of which only the beginning is
// kept, may be an error.
func (e Event) mayBeLongError() bool {
	kind := e.Kind()
	return isError(kind) || len(kind) == 0 && mayHoldError(e.Data)
}

// LongFailure returns the first error in the beginning of a stream, in events
// of any length, or nil if there is none. A [Watcher] does not keep as much:
// see [Watcher.OpensLong].
func LongFailure(stream []byte) (failure *Error) {
	var all []byte
	s := Splitter{Long: func(data []byte) { all = append(all, data...) }}
	read := func(e Event) {
		if e.TooLong {
			e.Data, e.TooLong = all, false
		}
		if all = all[:0]; failure == nil {
			failure = e.failure()
		}
	}
	s.Split(stream, read)
	s.End(read)
	return failure
}
