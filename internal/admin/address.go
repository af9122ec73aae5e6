package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// adminAddress returns the address of the admin API: from the option address, from
// the config file, or Caddy's default.
func adminAddress(flags caddycmd.Flags) (string, error) {
	address, file := flags.String("address"), flags.String("config")
	if address != "" || file == "" {
		return cmp.Or(address, caddy.DefaultAdminListen), nil
	}
	config, err := adminConfig(file, flags.String("adapter"))
	switch {
	case err != nil:
		return "", fmt.Errorf("could not read the address of the admin API from %s: %w", file, err)
	case config.Disabled:
		return "", fmt.Errorf("%s turns the admin API off", file)
	}
	return cmp.Or(config.Listen, caddy.DefaultAdminListen), nil
}

// adminConfig returns the options of the admin API in a config file. It evaluates
// nothing else in a Caddyfile: that may need variables which only the service has.
func adminConfig(file, adapter string) (admin caddy.AdminConfig, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return admin, err
	}
	config := struct{ Admin *caddy.AdminConfig }{&admin}
	if isCaddyfile(file, adapter) {
		blocks, err := caddyfile.Parse(file, text)
		if err != nil || len(blocks) == 0 || len(blocks[0].Keys) > 0 {
			return admin, err
		}
		global := blocks[0]
		global.Segments = slices.DeleteFunc(global.Segments, func(s caddyfile.Segment) bool { return s.Directive() != "admin" })
		adapted, _, err := httpcaddyfile.ServerType{}.Setup([]caddyfile.ServerBlock{global}, nil)
		if err != nil || adapted.Admin == nil {
			return admin, err
		}
		return *adapted.Admin, nil
	}
	if adapter != "" {
		by := caddyconfig.GetAdapter(adapter)
		if by == nil {
			return admin, fmt.Errorf("there is no config adapter '%s'", adapter)
		}
		if text, _, err = by.Adapt(text, map[string]any{"filename": file}); err != nil {
			return admin, err
		}
	}
	return admin, json.Unmarshal(text, &config)
}

// isCaddyfile reports whether Caddy reads a config file as a Caddyfile.
func isCaddyfile(file, adapter string) bool {
	name := strings.ToLower(filepath.Base(file))
	return adapter == "caddyfile" ||
		adapter == "" && filepath.Ext(name) != ".json" && (strings.HasPrefix(name, "caddyfile") || strings.HasSuffix(name, ".caddyfile"))
}
