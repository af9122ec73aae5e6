package openailb_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
	"github.com/openai-lb/caddy-openai-lb/internal/statuspage"
)

var updateIndex = flag.Bool("update-index", false, "write docs/index.md anew")

// names are those of one kind that the code has, and the pages that explain them.
type names struct {
	title string
	pages []string
	found map[string]bool
}

// TestTheIndexHasEveryName holds docs/index.md against the options, metrics, placeholders and fields
// of the code. Each has to be explained on a page, in backticks.
func TestTheIndexHasEveryName(t *testing.T) {
	var text strings.Builder
	text.WriteString("# Index\n\nEvery option, metric, placeholder and field, with the section that explains it. A test writes this page.\n")
	for _, kind := range namesInTheCode(t) {
		if len(kind.found) < 4 {
			t.Fatalf("found %d names for %q, expected more", len(kind.found), kind.title)
		}
		fmt.Fprintf(&text, "\n## %s\n\n", kind.title)
		for _, name := range slices.Sorted(maps.Keys(kind.found)) {
			section := explained(t, name, kind.pages)
			if section == "" {
				t.Errorf("%s: no page of %v explains %s", kind.title, kind.pages, name)
			}
			fmt.Fprintf(&text, "- [`%s`](%s)\n", name, section)
		}
	}
	const page = "docs/index.md"
	if *updateIndex {
		if err := os.WriteFile(page, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(page); err != nil || string(got) != text.String() {
		t.Errorf("%s is not what the code has (%v): run go test -run Index -update-index .", page, err)
	}
}

func namesInTheCode(t *testing.T) []names {
	t.Helper()
	options, fields := make(map[string]bool), make(map[string]bool)
	for _, file := range sources(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				if isSelector(n.Type, "directive", "Options") {
					for _, element := range n.Elts {
						add(options, element.(*ast.KeyValueExpr).Key)
					}
				}
			case *ast.CallExpr:
				if selector, ok := n.Fun.(*ast.SelectorExpr); ok && len(n.Args) > 1 {
					if x, ok := selector.X.(*ast.Ident); ok && x.Name == "zap" {
						add(fields, n.Args[0])
					}
				}
			}
			return true
		})
	}
	placeholders := make(map[string]bool)
	summaries := lbtest.ReadFile(t, "internal/observe/summary.go")
	for _, key := range regexp.MustCompile(`\tcase "(\w+)":`).FindAllStringSubmatch(string(summaries), -1) {
		placeholders["{http.openai_lb."+key[1]+"}"] = true
	}
	counted := make(described)
	for _, register := range []func(prometheus.Registerer) error{metrics.Register, replicas.Register} {
		if err := register(counted); err != nil {
			t.Fatal(err)
		}
	}
	adminFields := make(map[string]bool)
	jsonNames(reflect.TypeFor[admin.Backend](), adminFields)
	callers := make(map[string]bool)
	jsonNames(reflect.TypeFor[admin.Caller](), callers)
	maps.DeleteFunc(callers, func(name string, _ bool) bool { return adminFields[name] })
	page := make(map[string]bool)
	jsonNames(reflect.TypeFor[statuspage.Status](), page)
	maps.DeleteFunc(page, func(name string, _ bool) bool { return adminFields[name] || callers[name] })
	return []names{
		{"Options", []string{"docs/options.md", "docs/callers.md", "docs/affinity.md", "docs/replicas.md", "docs/operators.md", "docs/observability.md", "docs/simulator.md", "azure/README.md", "redis/README.md"}, options},
		{"Metrics", []string{"docs/observability.md", "docs/replicas.md"}, counted},
		{"Placeholders", []string{"docs/observability.md"}, placeholders},
		{"Fields of logs", []string{"docs/observability.md", "docs/replicas.md", "azure/README.md"}, fields},
		{"Fields of the admin API", []string{"docs/operators.md"}, adminFields},
		{"Fields of callers", []string{"docs/callers.md"}, callers},
		{"Fields of the status page", []string{"docs/operators.md", "docs/replicas.md"}, page},
	}
}

// sources parses all files but tests and the tools of tests.
func sources(t *testing.T) (files []*ast.File) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		if strings.Contains(path, "lbtest") || strings.HasPrefix(path, "tests") || strings.HasPrefix(path, "bench") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		files = append(files, file)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func isSelector(e ast.Expr, x, name string) bool {
	selector, ok := e.(*ast.SelectorExpr)
	if !ok || selector.Sel.Name != name {
		return false
	}
	ident, ok := selector.X.(*ast.Ident)
	return ok && ident.Name == x
}

// add adds a string if it is written as one.
func add(to map[string]bool, e ast.Expr) {
	if literal, ok := e.(*ast.BasicLit); ok && literal.Kind == token.STRING {
		if name, err := strconv.Unquote(literal.Value); err == nil {
			to[name] = true
		}
	}
}

// described is a registerer that only looks at the names.
type described map[string]bool

func (d described) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc, 100)
	c.Describe(descs)
	close(descs)
	for desc := range descs {
		d[regexp.MustCompile(`fqName: "caddy_openai_lb_(\w+)"`).FindStringSubmatch(desc.String())[1]] = true
	}
	return nil
}
func (d described) MustRegister(...prometheus.Collector) {}
func (d described) Unregister(prometheus.Collector) bool { return false }

// jsonNames adds the names that a struct has in JSON, and those of the structs in it.
func jsonNames(of reflect.Type, to map[string]bool) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return
	}
	for field := range of.Fields() {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" && name != "-" {
			to[name] = true
			jsonNames(field.Type, to)
		} else if field.Anonymous {
			jsonNames(field.Type, to)
		}
	}
}

// explained returns the link to the section that explains a name: one that has it as its heading, or
// the first one that has it in the first cell of a table, or elsewhere in backticks.
func explained(t *testing.T, name string, pages []string) (link string) {
	t.Helper()
	word := regexp.QuoteMeta(name)
	for _, pattern := range []*regexp.Regexp{
		regexp.MustCompile(`^#+ .*\b` + strings.Trim(word, `\{}`) + `\b`),
		regexp.MustCompile("^\\|[^|]*`" + word + "[` ]"),
		regexp.MustCompile("`" + word + "[` ]|^\\s*" + word + "\\s|\"" + word + "\":"),
	} {
		for _, page := range pages {
			heading, fenced := "", false
			for _, line := range strings.Split(readPage(t, page), "\n") {
				if strings.HasPrefix(line, "```") {
					fenced = !fenced
				}
				if !fenced && strings.HasPrefix(line, "#") {
					heading = anchors(line)[0]
				}
				if heading != "" && pattern.MatchString(line) {
					if page, ok := strings.CutPrefix(page, "docs/"); ok {
						return page + "#" + heading
					}
					return "../" + page + "#" + heading
				}
			}
		}
	}
	return ""
}

func readPage(t *testing.T, page string) string {
	t.Helper()
	text := lbtest.ReadFile(t, page)
	return string(text)
}
