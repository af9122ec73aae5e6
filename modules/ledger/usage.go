package ledger

import (
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
)

// showPages returns the pages of the ledger in memory and in the storage.
func showPages(r *http.Request) (any, error) {
	query, inPool, err := admin.QueryOf(r, "pool", "days", "replica")
	if err != nil {
		return nil, err
	}
	of, err := periodOf(query.Get("days"))
	if err != nil {
		return nil, admin.Refuse(http.StatusBadRequest, "query parameter days: %v", err)
	}
	pages, err := Pages(r.Context(), func(w Where) bool { return of.has(w.Day) && inPool(w.Pool) })
	if err != nil {
		return nil, admin.Refuse(http.StatusInternalServerError, "%v", err)
	}
	if pages == nil {
		pages = []Page{}
	}
	if !query.Has("replica") {
		return pages, nil
	}
	return allPages(r.Context(), query.Get("replica"), of, inPool, pages)
}

// period is a month or a day, as in 2026-11 or 2026-11-25.
type period string

func (p period) has(day string) bool {
	return day == string(p) || strings.HasPrefix(day, string(p)+"-")
}

// periodOf parses a period. An empty text means this month.
func periodOf(text string) (period, error) {
	text = cmp.Or(text, time.Now().UTC().Format("2006-01"))
	for _, layout := range []string{"2006-01", time.DateOnly} {
		if _, err := time.Parse(layout, text); err == nil {
			return period(text), nil
		}
	}
	return "", fmt.Errorf("'%s' is not a month or a day such as 2026-11 or 2026-11-25", text)
}

// usageOptions are the flags of the command usage.
type usageOptions struct {
	month, day, config, adapter, format, prices, check string
	replica                                            string
	addresses, by, backends                            []string
	columns                                            map[string]string
}

// usageCommand returns the command usage.
func usageCommand() *cobra.Command {
	var o usageOptions
	command := &cobra.Command{
		Use:   "usage",
		Short: "Adds up requests and tokens of a month or a day, for bills",
		Long: `
Adds up the ledger: the requests of a month or a day in UTC, and their tokens, as
backends have reported them. Tokens that no backend reported are in the columns
estimated_input and estimated_output.

With --config, the command reads the ledger from the storage of that configuration.
It has the requests of all replicas with this storage, except those of the last 10
seconds. Otherwise, the command asks the admin API at each --address, or at Caddy's
default address. A replica answers with what it has in memory and in its storage,
and, with the option state, with what the other replicas have. Replicas may share a
storage: each page of the ledger counts once.

With --prices, there is a column cost. The file is a CSV of prices per million tokens
with the columns model, service_tier, input, cached and output:

  model,service_tier,input,cached,output
  gpt-5.5,,2.50,1.25,10.00
  gpt-5.5,priority,4.25,2.125,17.00

A row without service_tier is for all service tiers without their own row. The
column cached may be missing. A model without a price has no cost, and a warning.

With --check, the command compares the tokens of each model with a provider's export, a CSV
with the names of OpenAI's usage API (model, input_tokens, output_tokens,
start_time) or of Azure Monitor (ModelDeploymentName, ProcessedPromptTokens,
GeneratedTokens, Timestamp). --columns gives other names. --backend selects the
backends of that provider. Versions at the end of models, such as -2024-08-06, are
ignored. The status is 1 if a model differs by more than 1 percent.
`,
		Example: "  caddy openai-lb usage --month 2026-11 --by caller,model",
		Args:    cobra.NoArgs, SilenceUsage: true,
	}
	flags := command.Flags()
	flags.StringVar(&o.month, "month", "", "Month, such as 2026-11 (default: this month)")
	flags.StringVar(&o.day, "day", "", "Day, such as 2026-11-25")
	flags.StringSliceVar(&o.by, "by", []string{"caller", "model"}, "Columns by which to add up: "+strings.Join(Columns, ", "))
	flags.StringVar(&o.format, "format", "table", "table or csv")
	flags.StringVarP(&o.config, "config", "c", "", "Configuration file, whose storage has the ledger")
	flags.StringVarP(&o.adapter, "adapter", "a", "", "Name of the config adapter to apply to it")
	flags.StringSliceVar(&o.addresses, "address", nil, "Address of an admin API. Repeatable")
	flags.StringSliceVar(&o.backends, "backend", nil, "Only this backend. Repeatable")
	flags.StringVar(&o.prices, "prices", "", "CSV file of prices")
	flags.StringVar(&o.check, "check", "", "CSV file of a provider's export to compare with")
	flags.StringToStringVar(&o.columns, "columns", nil, "Names of columns of --check, such as model=Deployment,input=Tokens")
	flags.String("replica", admin.EveryReplica, "Shows only what one replica knows: its host, or the beginning of its id")
	command.MarkFlagsMutuallyExclusive("config", "replica")
	command.MarkFlagsMutuallyExclusive("month", "day")
	command.MarkFlagsMutuallyExclusive("config", "address")
	command.MarkFlagsMutuallyExclusive("prices", "check")
	command.RunE = func(command *cobra.Command, _ []string) error {
		pool, _ := command.Flags().GetString("pool")
		o.replica, _ = command.Flags().GetString("replica")
		if o.format == "json" {
			return errors.New("format 'json' is not one of table, csv: use --json")
		}
		if asJSON, _ := command.Flags().GetBool("json"); asJSON {
			o.format = "json"
		}
		return o.run(command.OutOrStdout(), command.ErrOrStderr(), pool)
	}
	return command
}

func (o *usageOptions) run(out, warnings io.Writer, pool string) error {
	for _, name := range o.by {
		if !slices.Contains(Columns, name) {
			return fmt.Errorf("by '%s' is not a column: expected some of %s",
				cli.Printable(name), strings.Join(Columns, ", "))
		}
	}
	if !slices.Contains([]string{"table", "csv", "json"}, o.format) {
		return fmt.Errorf("format '%s' is not one of table, csv", cli.Printable(o.format))
	}
	of, err := periodOf(cmp.Or(o.day, o.month))
	if err != nil {
		return err
	}
	prices, err := readAs(o.prices, ReadPrices)
	if err != nil {
		return err
	}
	export, err := readAs(o.check, func(text []byte) (Export, error) { return ReadExport(text, o.columns, of.has) })
	if err != nil {
		return err
	}
	pages, err := o.pages(of, pool, warnings)
	if err != nil {
		return err
	}
	for _, p := range pages {
		if p.Unreadable != "" {
			fmt.Fprintf(warnings, "left out: %s\n", cli.Printable(p.Unreadable))
		}
	}
	entries := slices.DeleteFunc(Entries(pages), func(e Entry) bool {
		return o.backends != nil && !slices.Contains(o.backends, e.Backend)
	})
	if export != nil {
		return o.showDifferences(out, Compare(entries, export))
	}
	sums, unpriced := SumBy(o.by, entries, prices)
	for _, model := range unpriced {
		fmt.Fprintf(warnings, "no price for %s: no cost\n", cli.Printable(model))
	}
	return o.showSums(out, sums, prices != nil)
}

// readAs reads and parses a file, unless the name is empty.
func readAs[T any](name string, read func([]byte) (T, error)) (value T, err error) {
	if name == "" {
		return value, nil
	}
	text, err := cli.ReadFile(name)
	if err != nil {
		return value, err
	}
	if value, err = read(text); err != nil {
		err = fmt.Errorf("%s: %w", cli.Printable(name), err)
	}
	return value, err
}

// pages returns the pages of a period and of a pool. An empty pool means all
// pools.
func (o *usageOptions) pages(of period, pool string, warnings io.Writer) (pages []Page, err error) {
	if o.config != "" {
		return pagesOf(o.config, o.adapter,
			func(w Where) bool { return of.has(w.Day) && (pool == "" || w.Pool == pool) })
	}
	query := url.Values{"days": {string(of)}, "replica": {o.replica}}
	if pool != "" {
		query.Set("pool", pool)
	}
	if len(o.addresses) == 0 {
		o.addresses = []string{caddy.DefaultAdminListen}
	}
	for _, address := range o.addresses {
		answer, err := admin.Ask(address, http.MethodGet, usagePath, query)
		if err != nil {
			return nil, err
		}
		var more admin.All[Page]
		if err := admin.Decode(answer, &more); err != nil {
			return nil, err
		}
		pages = append(pages, more.Rows...)
		admin.ShowWhose(warnings, more.Connected, more.Replicas)
	}
	return Newest(pages), nil
}

// pagesOf returns pages in the storage of a config file.
func pagesOf(file, adapter string, want func(Where) bool) ([]Page, error) {
	var config struct {
		StorageRaw json.RawMessage `json:"storage,omitempty" caddy:"namespace=caddy.storage inline_key=module"`
	}
	if err := admin.ReadOption("storage", file, adapter, &config); err != nil {
		return nil, fmt.Errorf("could not read the storage of %s: %w", file, err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	storage := certmagic.Storage(caddy.DefaultStorage)
	if config.StorageRaw != nil {
		module, err := ctx.LoadModule(&config, "StorageRaw")
		if err != nil {
			return nil, fmt.Errorf("the storage of %s: %w", file, err)
		}
		if storage, err = module.(caddy.StorageConverter).CertMagicStorage(); err != nil {
			return nil, fmt.Errorf("the storage of %s: %w", file, err)
		}
	}
	if !IsIn(ctx, storage) {
		return nil, fmt.Errorf("the storage of %s has no ledger that can be read: it is saved 10 s after a request, in the storage of the user who runs Caddy",
			file)
	}
	return Read(ctx, storage, want)
}

// showSums prints the sums.
func (o *usageOptions) showSums(out io.Writer, sums []*Sum, priced bool) error {
	header := append(slices.Clone(o.by), "requests", "input", "cached", "output", "reasoning", "estimated_input", "estimated_output")
	if priced {
		header = append(header, "cost")
	}
	var rows [][]any
	for _, s := range sums {
		var row []any
		for _, value := range s.Values {
			row = append(row, value)
		}
		for _, number := range []int64{
			s.Requests, s.Input, s.Cached, s.Output, s.Reasoning, s.EstimatedInput, s.EstimatedOutput,
		} {
			row = append(row, number)
		}
		if priced && s.Priced {
			row = append(row, s.Cost)
		} else if priced {
			row = append(row, nil)
		}
		rows = append(rows, row)
	}
	return show(out, o.format, header, rows)
}

// showDifferences prints how models differ from an export. It returns an error
// if a model differs by too much.
func (o *usageOptions) showDifferences(out io.Writer, all []Difference) error {
	var rows [][]any
	differ := 0
	for _, d := range all {
		if d.Differs() {
			differ++
		}
		rows = append(rows, []any{d.Model, d.Input, d.ExportedInput, percent(d.Input, d.ExportedInput), d.Output,
			d.ExportedOutput, percent(d.Output, d.ExportedOutput)})
	}
	err := show(out, o.format, []string{"model", "input", "exported_input", "input_percent", "output",
		"exported_output", "output_percent"}, rows)
	if err == nil && differ > 0 {
		err = fmt.Errorf("the tokens of %d of %s differ by more than %d%%",
			differ, cli.Number(len(all), "model"), MaxPercent)
	}
	if err == nil && len(all) == 0 {
		err = errors.New("there is nothing to compare: neither the ledger nor the export has tokens of that time")
	}
	return err
}

// percent returns a difference, or nil if the export has none of the tokens.
func percent(counted, exported int64) any {
	if exported == 0 && counted != 0 {
		return nil
	}
	return Percent(counted, exported)
}

// formula matches text that a spreadsheet would execute in a cell. Some
// spreadsheets begin a new cell after any semicolon.
var formula = regexp.MustCompile(`(^|;)([\s"]*[=+\-@])`)

// show prints rows in a format. Cells are strings, int64s, float64s, or nil.
func show(out io.Writer, format string, header []string, rows [][]any) error {
	if format == "json" {
		objects := []map[string]any{}
		for _, row := range rows {
			object := make(map[string]any)
			for i, name := range header {
				object[name] = row[i]
			}
			objects = append(objects, object)
		}
		return json.NewEncoder(out).Encode(objects)
	}
	lines := [][]string{header}
	for _, row := range rows {
		var line []string
		for _, cell := range row {
			text := textOf(cell)
			if _, made := cell.(string); made && format == "csv" {
				text = formula.ReplaceAllString(text, "$1'$2") // clients can make up models
			}
			line = append(line, text)
		}
		lines = append(lines, line)
	}
	if format == "csv" {
		return csv.NewWriter(out).WriteAll(lines)
	}
	for i, name := range header {
		header[i] = strings.ToUpper(strings.ReplaceAll(name, "_", " "))
	}
	table := cli.NewTable(out, header...)
	for _, line := range lines[1:] {
		for i, text := range line {
			line[i] = cmp.Or(text, "-")
		}
		table.Row(line...)
	}
	return table.Flush()
}

func textOf(cell any) string {
	switch cell := cell.(type) {
	case string:
		return cli.Printable(cell)
	case int64:
		return strconv.FormatInt(cell, 10)
	case float64:
		return strconv.FormatFloat(cell, 'f', 4, 64)
	}
	return ""
}
