package ledger

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// exported are the known names of columns in a provider's export: those of
// OpenAI's usage API, and those of Azure Monitor's metrics and dimensions. They
// are in lower case, and have only letters and digits.
var exported = map[string][]string{
	"day":          {"starttimeiso", "starttime", "date", "day", "usagedate", "timestamp"},
	"model":        {"model", "modelname", "modeldeploymentname", "deployment"},
	"input":        {"inputtokens", "prompttokens", "processedprompttokens"},
	"input_audio":  {"inputaudiotokens"}, // OpenAI's input tokens are those of texts
	"output":       {"outputtokens", "completiontokens", "generatedtokens", "generatedcompletiontokens"},
	"output_audio": {"outputaudiotokens"},
}

var notInNames = regexp.MustCompile(`[^a-z0-9]+`)

// Export is the use by model that a provider reports.
type Export map[string]*Use

// ReadExport reads a provider's CSV file, for the days for which want returns
// true. names has columns with other than the known names, by day, model, input
// and output.
func ReadExport(text []byte, names map[string]string, want func(day string) bool) (Export, error) {
	t, err := readTable(text)
	if err != nil {
		return nil, err
	}
	for what := range names {
		if _, ok := exported[what]; !ok {
			return nil, fmt.Errorf("'%s' is not one of %s", what, strings.Join(slices.Sorted(maps.Keys(exported)), ", "))
		}
	}
	columns := make(map[string]string)
	for what, usual := range exported {
		if name, ok := names[what]; ok {
			if columns[what] = strings.ToLower(name); !slices.Contains(t.header, columns[what]) {
				return nil, fmt.Errorf("there is no column '%s': there are %s", name, strings.Join(t.header, ", "))
			}
			continue
		}
		for _, name := range usual {
			i := slices.IndexFunc(t.header, func(h string) bool { return notInNames.ReplaceAllString(h, "") == name })
			if i >= 0 && columns[what] == "" {
				columns[what] = t.header[i]
			}
		}
	}
	if columns["model"] == "" || columns["input"] == "" && columns["output"] == "" {
		return nil, fmt.Errorf("no column has the model, or none has tokens: name them, as in model=Deployment,input=Tokens; there are %s",
			strings.Join(t.header, ", "))
	}
	export := make(Export)
	for t.next() {
		if columns["day"] != "" {
			day, err := dayIn(t.value(columns["day"]))
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", t.line, err)
			}
			if !want(day) {
				continue
			}
		}
		var u Use
		for what, into := range map[string]*int64{
			"input": &u.Input, "input_audio": &u.Input, "output": &u.Output, "output_audio": &u.Output,
		} {
			text := t.value(columns[what])
			if columns[what] == "" || text == "" {
				continue
			}
			number, err := strconv.ParseFloat(text, 64) // Azure Monitor's metrics are such numbers
			if err != nil || !(number >= 0 && number < 1e18) {
				return nil, fmt.Errorf("line %d: %s '%s' is not a number of tokens", t.line, columns[what], text)
			}
			*into += int64(number)
		}
		export.of(t.value(columns["model"])).Add(u)
	}
	return export, t.err
}

func (e Export) of(model string) *Use {
	model = withoutVersion(model)
	if e[model] == nil {
		e[model] = new(Use)
	}
	return e[model]
}

// dayIn returns the UTC day of a time, which is Unix time in seconds, or begins
// with a date.
func dayIn(text string) (string, error) {
	if seconds, err := strconv.ParseInt(text, 10, 64); err == nil {
		return time.Unix(seconds, 0).UTC().Format(time.DateOnly), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at.UTC().Format(time.DateOnly), nil
	}
	day := text[:min(len(text), len(time.DateOnly))]
	if _, err := time.Parse(time.DateOnly, day); err != nil {
		return "", fmt.Errorf("'%s' is not a date such as 2026-11-25", text)
	}
	return day, nil
}

// version matches a model's version at the end of its name. Clients may omit
// it.
var version = regexp.MustCompile(`-(\d{4}-\d\d-\d\d|\d{4})$`)

func withoutVersion(model string) string { return version.ReplaceAllString(model, "") }

// Difference compares the use of a model in the ledger with an export.
type Difference struct {
	Model          string `json:"model"`
	Input          int64  `json:"input"`
	ExportedInput  int64  `json:"exported_input"`
	Output         int64  `json:"output"`
	ExportedOutput int64  `json:"exported_output"`
}

// Percent returns by how many percent our number differs from the exported one.
// It may be infinite.
func Percent(counted, exported int64) float64 {
	if counted == exported {
		return 0
	}
	return 100 * float64(counted-exported) / float64(exported)
}

// MaxPercent is by how many percent a model may differ from an export.
const MaxPercent = 1

// Differs reports whether the model differs by more than MaxPercent.
func (d *Difference) Differs() bool {
	return math.Abs(Percent(d.Input, d.ExportedInput)) > MaxPercent ||
		math.Abs(Percent(d.Output, d.ExportedOutput)) > MaxPercent
}

// Compare compares entries with an export by model, ignoring versions.
func Compare(entries []Entry, export Export) (all []Difference) {
	counted := make(Export)
	for _, e := range entries {
		if input, output := e.Input+e.EstimatedInput, e.Output+e.EstimatedOutput; input+output > 0 {
			counted.of(e.Model).Add(Use{Input: input, Output: output})
		}
	}
	for model := range maps.Keys(export) {
		counted.of(model)
	}
	for model, u := range counted {
		exported := export.of(model)
		all = append(all, Difference{model, u.Input, exported.Input, u.Output, exported.Output})
	}
	slices.SortFunc(all, func(a, b Difference) int { return cmp.Compare(a.Model, b.Model) })
	return all
}
