package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
)

// option is a field of a struct of options. Its comment is where the option is
// described: the first paragraph is "<Field> is <meaning>. Default:
// <default>.", and its syntax in a Caddyfile is set off as code.
type option struct {
	name, meaning, fallback string
	// syntax are lines. The last one may begin a block, which has the options
	// of another struct.
	syntax   []string
	block    string
	embedded bool
	position string
}

var firstParagraph = regexp.MustCompile(`(?s)^\w+ (?:is|are) (.+?)\.\s+Default:\s+(.+?)\.(?:\n\n|\n?$)`)

// optionsOf returns the options of a struct, named by its package and its name.
func optionsOf(of string) (options []option) {
	pkg, name, _ := strings.Cut(of, ".")
	files, err := filepath.Glob(filepath.Join("internal", pkg, "*.go"))
	if pkg == "openailb" {
		files, err = []string{"module.go"}, nil
	}
	must(err)
	set := token.NewFileSet()
	for _, path := range files {
		file, err := parser.ParseFile(set, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		must(err)
		ast.Inspect(file, func(n ast.Node) bool {
			declared, ok := n.(*ast.TypeSpec)
			if !ok || declared.Name.Name != name {
				return true
			}
			for _, f := range declared.Type.(*ast.StructType).Fields.List {
				options = append(options, optionOf(set, pkg, f))
			}
			return false
		})
	}
	if len(options) == 0 {
		wrong("no package has a struct %s", of)
	}
	return options
}

func optionOf(set *token.FileSet, pkg string, f *ast.Field) (o option) {
	o.position, o.embedded = set.Position(f.Pos()).String(), len(f.Names) == 0
	ast.Inspect(f.Type, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			o.block = n.X.(*ast.Ident).Name + "." + n.Sel.Name
			return false
		case *ast.Ident:
			o.block = pkg + "." + n.Name
		}
		return true
	})
	text := f.Doc.Text()
	for _, line := range strings.Split(text, "\n") {
		if code, ok := strings.CutPrefix(line, "\t"); ok {
			o.syntax = append(o.syntax, strings.ReplaceAll(code, "    ", "\t"))
		}
	}
	if len(o.syntax) > 0 {
		o.name, _, _ = strings.Cut(o.syntax[0], " ")
	}
	if found := firstParagraph.FindStringSubmatch(text); found != nil {
		o.meaning, o.fallback = strings.ReplaceAll(found[1], "\n", " "), strings.ReplaceAll(found[2], "\n", " ")
	}
	return o
}

// syntaxOf returns the syntax of the options of a struct, with names of one
// length side by side.
func syntaxOf(of, indent string) string {
	var text strings.Builder
	var side [][2]string
	flush := func() {
		longest := 0
		for _, line := range side {
			longest = max(longest, len(line[0]))
		}
		for _, line := range side {
			text.WriteString(strings.TrimRight(fmt.Sprintf("%s%-*s %s", indent, longest, line[0], line[1]), " ") + "\n")
		}
		side = nil
	}
	apart := func(block string) {
		flush()
		if text.Len() > 0 && !strings.HasSuffix(text.String(), "\n\n") {
			text.WriteString("\n")
		}
		text.WriteString(block)
	}
	for _, o := range optionsOf(of) {
		switch {
		case o.embedded && o.block != "backend.Resolved":
			apart(syntaxOf(o.block, indent) + "\n")
		case len(o.syntax) == 0:
		case strings.HasSuffix(o.syntax[len(o.syntax)-1], "{"):
			apart(indent + strings.Join(o.syntax, "\n"+indent) + "\n" + syntaxOf(o.block, indent+"\t") + indent + "}\n")
		case len(o.syntax) > 1:
			apart(indent + strings.Join(o.syntax, "\n"+indent) + "\n")
		default:
			name, arguments, _ := strings.Cut(o.syntax[0], " ")
			side = append(side, [2]string{name, arguments})
		}
	}
	flush()
	return strings.TrimRight(text.String(), "\n") + "\n"
}

// tableOf returns the table of some options, by their names, or by the structs
// that have them.
func tableOf(which []string, page string) string {
	text := "| option | meaning | default |\n|---|---|---|\n"
	for _, w := range which {
		of := w
		if !strings.Contains(w, ".") {
			of = "openailb.Handler"
		}
		for _, o := range optionsOf(of) {
			if o.name == "" || of != w && o.name != w {
				continue
			}
			if o.meaning == "" {
				wrong("%s: the comment does not begin with \"<Field> is <meaning>. Default: <default>.\"", o.position)
			}
			cell := "`" + o.name + "`"
			if heading := regexp.MustCompile(`(?m)^#+ .*\b` + o.name + `\b.*$`).FindString(page); heading != "" {
				cell = "[" + cell + "](#" + anchor(heading) + ")"
			}
			text += fmt.Sprintf("| %s | %s | %s |\n", cell, o.meaning, o.fallback)
		}
	}
	return text
}

// optionsPage returns docs/options.md with the syntax and the tables that the
// comments of the options say. Each option that is read from a Caddyfile has to
// be in the syntax.
func optionsPage(page string) string {
	syntax := "openai_lb [<matcher>] {\n" + syntaxOf("openailb.Handler", "\t") + "}\n"
	page = regexp.MustCompile("(?s)<!-- syntax -->\n```text\n.*?```").ReplaceAllLiteralString(page,
		"<!-- syntax -->\n```text\n"+syntax+"```")
	var readers []*ast.File
	for _, path := range []string{"caddyfile.go", "internal/attempt/health.go", "internal/attempt/options.go", "internal/backend/caddyfile.go",
		"internal/affinity/options.go", "modules/callers/caddyfile.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		must(err)
		readers = append(readers, file)
	}
	for name := range optionNames(readers) {
		if !regexp.MustCompile(`(?m)^\t+` + name + `\b`).MatchString(syntax) {
			wrong("no comment has the syntax of %s", name)
		}
	}
	return regexp.MustCompile(`(?s)<!-- options: ([^>]+) -->\n.*?\n\n`).ReplaceAllStringFunc(page,
		func(old string) string {
			marker, _, _ := strings.Cut(old, "\n")
			which := strings.Split(strings.TrimSuffix(strings.TrimPrefix(marker, "<!-- options: "), " -->"), ", ")
			return marker + "\n" + tableOf(which, page) + "\n"
		})
}
