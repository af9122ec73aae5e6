package sse

// Undecided reports whether the stream has no content so far. An event that has
// not ended does not count as content while it has at most limit bytes. A
// longer one does not if its kind is a preamble's or an error's: the first
// events of a response repeat its instructions, which may be long, and so does
// the event of a failed response.
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

// mayBeLongError reports whether the event, whose beginning is kept, may be an
// error.
func (e Event) mayBeLongError() bool {
	kind := e.Kind()
	return mayBeError(kind) || len(kind) == 0 && mayHoldError(e.Data)
}

// LongFailure returns the first error in the beginning of a stream, or nil if
// there is none. It reads events of any length, while a [Watcher] keeps only
// part of a long one: see [Watcher.OpensLong].
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
