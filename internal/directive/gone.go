package directive

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// gone are options of earlier versions, with what applies instead.
var gone = map[string]string{
	"stream_require_end": "a backend that has sent an end mark for an operation must send it in each of its streams",
}

// UnmarshalJSON reads the options of a module from JSON as strictly as Caddy does. A module whose earlier versions
// had other options uses it, so that the error says what applies instead of them.
func UnmarshalJSON(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	if err == nil {
		return nil
	}
	quoted, _ := strings.CutPrefix(err.Error(), "json: unknown field ")
	if gone := goneOption(strings.Trim(quoted, `"`)); gone != nil {
		return gone
	}
	return err
}

// goneOption returns the error for an option that earlier versions had, and nil for other names.
func goneOption(name string) error {
	if instead := gone[name]; instead != "" {
		return fmt.Errorf("%s is no longer an option: %s", name, instead)
	}
	return nil
}
