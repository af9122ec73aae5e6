// Package ratelimit defines limits of requests and tokens: what a limit is,
// what a request asks of it and is refused for, and [Limiter], which counts the
// use. The core uses this package and not package limiter, with which the
// modules behind the seam of admission count the use.
package ratelimit

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Kind says whether a limit counts requests or tokens.
type Kind uint8

// The kinds of limits.
const (
	Requests Kind = iota
	Tokens
	// Kinds is the number of kinds.
	Kinds = 2
)

var kindNames = [Kinds]string{"requests", "tokens"}

func (k Kind) String() string { return kindNames[k] }

// Unit is the length of a limit's window.
type Unit uint8

// The units. Windows of a second, a minute or an hour slide; those of a day or
// a month follow the calendar.
const (
	Second Unit = iota
	Minute
	Hour
	Day
	Month
	// Units is the number of units.
	Units = 5
)

var unitNames = [Units]string{"second", "minute", "hour", "day", "month"}

func (u Unit) String() string { return unitNames[u] }

// Calendar reports whether windows of this unit follow the calendar.
func (u Unit) Calendar() bool { return u >= Day }

var lengths = [Units]time.Duration{Second: time.Second, Minute: time.Minute, Hour: time.Hour}

// Length returns how long the unit is. It is 24 hours at least for those of the
// calendar.
func (u Unit) Length() time.Duration { return cmp.Or(lengths[u], 24*time.Hour) }

// MaxAmount is the largest limit, 10^15. Larger counts from a backend are
// reduced to it.
const MaxAmount = 1_000_000_000_000_000

// Limit is how many requests or tokens a caller may use in a window.
type Limit struct {
	Kind   Kind
	Amount int64
	Unit   Unit
	// Model is the only model whose requests count. If it is empty, those of
	// all models count.
	Model string
	// Then is the tier of requests over the limit. If it is empty, they are
	// refused.
	Then string
}

// ParseLimit parses a limit such as 200k/minute.
func ParseLimit(kind Kind, text string) (Limit, error) {
	l := Limit{Kind: kind}
	number, unit, _ := strings.Cut(text, "/")
	u := slices.Index(unitNames[:], unit)
	var ok bool
	if l.Amount, ok = parseAmount(number); !ok || u < 0 {
		return Limit{}, fmt.Errorf("%q is not a limit of %s: expected <number>/<unit>, such as 200k/minute, with a whole number from 1 to 10^15, which may end in k, M or G, and the unit %s or %s",
			text, kind, strings.Join(unitNames[:Units-1], ", "), unitNames[Units-1])
	}
	l.Unit = Unit(u)
	return l, nil
}

// parseAmount parses a whole number from 1 to MaxAmount, such as 600, 200k, 5M
// or 1G.
func parseAmount(text string) (amount int64, ok bool) {
	digits := strings.TrimRight(text, "kMG")
	factor, ok := map[string]int64{"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}[text[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil || n == 0 || n > MaxAmount/uint64(factor) {
		return 0, false
	}
	return int64(n) * factor, true
}

// String returns the limit as it is written in a config.
func (l Limit) String() string {
	text := l.amount() + "/" + l.Unit.String()
	if l.Model != "" {
		text += " " + l.Model
	}
	if l.Then != "" {
		text += " then " + l.Then
	}
	return text
}

func (l Limit) amount() string {
	n, suffix := l.Amount, ""
	for _, s := range []string{"k", "M", "G"} {
		if n == 0 || n%1000 != 0 {
			break
		}
		n, suffix = n/1000, s
	}
	return strconv.FormatInt(n, 10) + suffix
}

// ID identifies a limit of a caller. A caller has at most one limit of each
// kind and unit for all models, and one for each model.
type ID uint8

// MaxLimits is the maximum number of limits of a caller for all models, and of
// those for one model.
const MaxLimits = Kinds * Units

// ID returns the limit's id.
func (l Limit) ID() ID { return ID(l.Kind)*Units + ID(l.Unit) }

// Kind returns the kind of the limit.
func (id ID) Kind() Kind { return Kind(id / Units) }

// Unit returns the unit of the limit's window.
func (id ID) Unit() Unit { return Unit(id % Units) }

// Valid reports whether id is the ID of a limit.
func (id ID) Valid() bool { return id < MaxLimits }

func (id ID) String() string { return id.Kind().String() + "/" + id.Unit().String() }

// MarshalText implements encoding.TextMarshaler.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (id *ID) UnmarshalText(text []byte) error {
	for i := range ID(MaxLimits) {
		if i.String() == string(text) {
			*id = i
			return nil
		}
	}
	return fmt.Errorf("unknown limit %q", text)
}
