package ledger

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// Prices are the prices of tokens by model and service tier. A price without a
// service tier applies to all tiers without a price. The price of fast also
// applies to priority, its older name, and vice versa, unless both have one.
type Prices map[[2]string]price

// price is the price of a million tokens.
type price struct{ input, cached, output float64 }

// cost returns the cost of a row. It returns false if the row has tokens
// without a price.
func (p Prices) cost(r *Row) (cost float64, ok bool) {
	input, output := r.Input+r.EstimatedInput-r.Cached, r.Output+r.EstimatedOutput
	if input == 0 && output == 0 && r.Cached == 0 {
		return 0, true
	}
	var rates price
	for _, tier := range []string{r.ServiceTier, openaiapi.SynonymOf(r.ServiceTier), ""} {
		if rates, ok = p[[2]string{r.Model, tier}]; ok {
			break
		}
	}
	return (float64(input)*rates.input + float64(r.Cached)*rates.cached + float64(output)*rates.output) / 1e6, ok
}

// ReadPrices reads a CSV file with the columns model, input and output, and
// optionally service_tier and cached. Without a price for cached tokens, they
// cost as much as other input.
func ReadPrices(text []byte) (Prices, error) {
	t, err := readTable(text)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"model", "input", "output"} {
		if !slices.Contains(t.header, name) {
			return nil, fmt.Errorf("there is no column '%s': expected model, service_tier, input, cached, output, of which service_tier and cached may be missing",
				name)
		}
	}
	prices := make(Prices)
	for t.next() {
		var p price
		for _, c := range []struct {
			name string
			into *float64
		}{{"input", &p.input}, {"output", &p.output}, {"cached", &p.cached}} {
			text := t.value(c.name)
			if c.name == "cached" && text == "" {
				p.cached = p.input
				continue
			}
			number, err := strconv.ParseFloat(text, 64)
			if err != nil || !(number >= 0 && number < 1e9) {
				return nil, fmt.Errorf("line %d: %s '%s' is not a price of a million tokens, such as 2.50",
					t.line, c.name, text)
			}
			*c.into = number
		}
		key := [2]string{t.value("model"), t.value("service_tier")}
		if _, known := prices[key]; known {
			return nil, fmt.Errorf("line %d: model '%s' with service_tier '%s' is given twice", t.line, key[0], key[1])
		}
		if tier := key[1]; tier != "" && openaiapi.TierName(tier) != tier {
			return nil, fmt.Errorf("line %d: service_tier '%s' is not known: expected one of %s",
				t.line, tier, openaiapi.ServiceTierNames())
		}
		prices[key] = p
	}
	return prices, t.err
}

// table is a CSV file with a header, read line by line. The names of its
// columns are in lower case.
type table struct {
	reader *csv.Reader
	header []string
	record []string
	line   int
	err    error
}

func readTable(text []byte) (*table, error) {
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // the byte order mark, which spreadsheets write
	t := &table{reader: csv.NewReader(bytes.NewReader(text))}
	t.reader.TrimLeadingSpace = true
	header, err := t.reader.Read()
	if errors.Is(err, io.EOF) {
		return nil, errors.New("it is empty: expected a line with the names of its columns")
	}
	for _, name := range header {
		t.header = append(t.header, strings.ToLower(strings.TrimSpace(name)))
	}
	return t, err
}

// next reads the next line. It returns false at the end, or after an error.
func (t *table) next() bool {
	if t.record, t.err = t.reader.Read(); t.err != nil {
		if errors.Is(t.err, io.EOF) {
			t.err = nil
		}
		return false
	}
	t.line, _ = t.reader.FieldPos(0)
	return true
}

// value returns the line's value in a column. It is empty if there is no such
// column.
func (t *table) value(name string) string {
	if i := slices.Index(t.header, name); i >= 0 && i < len(t.record) {
		return strings.TrimSpace(t.record[i])
	}
	return ""
}
