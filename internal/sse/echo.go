package sse

// OnlyPreambles reports whether all events so far are preambles. An event that has not ended counts as one while it has at
// most limit bytes, or if it says what it is: the first events of a response repeat its instructions, which may be long.
func (w *Watcher) OnlyPreambles(limit int) bool {
	s := &w.splitter
	if w.Opening != Preamble {
		return false
	}
	if s.Unfinished() <= limit {
		return true
	}
	line, _ := cutField(s.partial.text, "data")
	for _, data := range [][]byte{s.data, line} {
		if isPreamble(Event{Name: s.name[:s.named], Data: data}.Kind()) {
			return true
		}
	}
	return false
}
