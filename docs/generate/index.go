package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

// names are those of one kind that the code has, and the pages that explain
// them.
type names struct {
	title string
	pages []string
	found map[string]bool
}

// indexPage returns docs/index.md: the options, metrics, placeholders and
// fields of the code. Each has to be explained on a page, in backticks.
func indexPage() string {
	var text strings.Builder
	text.WriteString("# Index\n\nEvery option, metric, placeholder and field, with the section that explains it. `go generate` writes this page.\n")
	for _, kind := range namesInTheCode() {
		if len(kind.found) < 4 {
			wrong("found %d names for %q, expected more", len(kind.found), kind.title)
		}
		var links []string
		for _, name := range slices.Sorted(maps.Keys(kind.found)) {
			section := explained(name, kind.pages)
			if section == "" {
				wrong("%s: no page of %v explains %s", kind.title, kind.pages, name)
			}
			links = append(links, fmt.Sprintf("[`%s`](%s)", name, section))
		}
		fmt.Fprintf(&text, "\n## %s\n\n%s\n", kind.title, strings.Join(links, ",\n"))
	}
	return text.String()
}

func namesInTheCode() []names {
	fields := make(map[string]bool)
	files := sources()
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			// the fields of an access log are the placeholders
			if f, ok := n.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "fields" {
				return false
			}
			if call, ok := n.(*ast.CallExpr); ok && len(call.Args) > 1 {
				if selector, ok := call.Fun.(*ast.SelectorExpr); ok && isSelector(selector, "zap", selector.Sel.Name) {
					add(fields, call.Args[0])
				}
			}
			return true
		})
	}
	placeholders := make(map[string]bool)
	summaries := read("internal/observe/summary.go")
	for _, key := range regexp.MustCompile(`\b(?:text|zap\.\w+)\("?(\w+?)(?:"|Field), `).FindAllStringSubmatch(
		summaries, -1) {
		placeholders["{http.openai_lb."+key[1]+"}"] = true
	}
	counted := make(described)
	for _, register := range []func(prometheus.Registerer) error{metrics.Register, replicas.Register} {
		must(register(counted))
	}
	adminFields := make(map[string]bool)
	jsonNames(reflect.TypeFor[status.Backend](), adminFields)
	callers := make(map[string]bool)
	jsonNames(reflect.TypeFor[status.Caller](), callers)
	maps.DeleteFunc(callers, func(name string, _ bool) bool { return adminFields[name] })
	page := make(map[string]bool)
	jsonNames(reflect.TypeFor[statuspage.Status](), page)
	maps.DeleteFunc(page, func(name string, _ bool) bool { return adminFields[name] || callers[name] })
	return []names{
		{"Options", []string{"docs/options.md", "docs/reverse-proxy.md", "docs/callers.md", "docs/affinity.md", "docs/replicas.md", "docs/operators.md", "docs/observability.md", "docs/simulator.md", "azure/README.md", "oidc/README.md", "redis/README.md"}, optionNames(files)},
		{"Metrics", []string{"docs/observability.md", "docs/replicas.md"}, counted},
		{"Placeholders", []string{"docs/observability.md"}, placeholders},
		{"Fields of logs", []string{"docs/observability.md", "docs/replicas.md", "azure/README.md", "oidc/README.md"}, fields},
		{"Fields of the admin API", []string{"docs/operators.md"}, adminFields},
		{"Fields of callers", []string{"docs/callers.md"}, callers},
		{"Fields of the status page", []string{"docs/operators.md", "docs/replicas.md"}, page},
	}
}

// optionNames returns the options that files read from a Caddyfile, without
// those that are always errors.
func optionNames(files []*ast.File) map[string]bool {
	options := make(map[string]bool)
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			if literal, ok := n.(*ast.CompositeLit); ok && isSelector(literal.Type, "directive", "Options") {
				for _, element := range literal.Elts {
					option := element.(*ast.KeyValueExpr)
					if call, ok := option.Value.(*ast.CallExpr); !ok || !isSelector(call.Fun, "directive", "Refused") {
						add(options, option.Key)
					}
				}
			}
			return true
		})
	}
	return options
}

// sources parses all files but tests and the tools of tests.
func sources() (files []*ast.File) {
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		if strings.Contains(path, "lbtest") || strings.HasPrefix(path, "docs") || strings.HasPrefix(path, "tests") ||
			strings.HasPrefix(path, "bench") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		files = append(files, file)
		return err
	})
	must(err)
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

// jsonNames adds the names that a struct has in JSON, and those of the structs
// in it.
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

// explained returns the link to the section that explains a name. The first of
// these that any page has decides, because a page that only mentions a name
// often comes before the one that explains it:
//
//  1. a heading that is the name, or a list of names: "priority and weight",
//     or that asks for it: "What an account is"
//  2. a link to a section of these pages whose text is the name
//  3. a table with the name in its first cell
//  4. a list whose item begins with it
//  5. the name in a text, in backticks, but not in a cell about another name
//  6. the name in a configuration or in JSON
//  7. the name anywhere else in backticks
//
// The syntax in options.md has every option and explains none.
func explained(name string, pages []string) (link string) {
	word := regexp.QuoteMeta(name)
	backticks := "`" + word + "[` ]"
	bare := strings.Trim(word, `\{}`)
	listed := regexp.MustCompile(`^#+ (?:(?:[Aa]n? |[Tt]he )?(?:[\w.]+(?:, | and ))*` + bare +
		`(?:(?:, | and )[\w.]+)*|What an? ` + bare + ` is)$`)
	linked := regexp.MustCompile("\\[`" + word + "`\\]\\(([^):]*#[^)]+)\\)")
	inFirstCell := regexp.MustCompile("^\\|[^|]*" + backticks)
	inList := regexp.MustCompile("^- [^:]*" + backticks)
	inText := regexp.MustCompile("^[^|].*" + backticks + "|^" + backticks)
	written := regexp.MustCompile("^\\s*" + word + "\\s|\"" + word + "\":")
	anywhere := regexp.MustCompile(backticks)
	in := func(pattern *regexp.Regexp) func(section, line string) string {
		return func(section, line string) string {
			if pattern.MatchString(line) {
				return section
			}
			return ""
		}
	}
	for _, rule := range []struct {
		fenced bool
		link   func(section, line string) string
	}{
		{false, in(listed)},
		{false, func(section, line string) string {
			if target := linked.FindStringSubmatch(line); target != nil {
				return linkFrom(section, target[1])
			}
			return ""
		}},
		{false, in(inFirstCell)},
		{false, in(inList)},
		{false, in(inText)},
		{true, in(written)},
		{false, in(anywhere)},
	} {
		for _, page := range pages {
			section, fenced := "", false
			for line := range strings.SplitSeq(read(page), "\n") {
				if strings.HasPrefix(line, "```") {
					fenced = !fenced
				}
				if !fenced && strings.HasPrefix(line, "#") {
					section = fromDocs(page) + "#" + anchor(line)
				}
				if section == "" || section == "options.md#syntax" || fenced != rule.fenced {
					continue
				}
				if link := rule.link(section, line); link != "" {
					return link
				}
			}
		}
	}
	return ""
}

// linkFrom returns the target of a link in a section, as a link from docs.
func linkFrom(section, target string) string {
	page, _, _ := strings.Cut(section, "#")
	file, heading, _ := strings.Cut(target, "#")
	if file != "" {
		page = path.Join(path.Dir(page), file)
	}
	return page + "#" + heading
}

// fromDocs returns the path of a page as seen from a page in docs.
func fromDocs(page string) string {
	if name, ok := strings.CutPrefix(page, "docs/"); ok {
		return name
	}
	return "../" + page
}

// anchor is that which GitHub gives to a heading.
func anchor(heading string) string {
	name := strings.ReplaceAll(strings.ToLower(strings.TrimLeft(heading, "# ")), " ", "-")
	return regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(name, "")
}
