package openaiapi

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"strings"
)

// AccountOf returns the account of a backend. It is the digest of the account's
// name or, without a name, of the URL and the fingerprint of the credential.
// All keys of an Azure resource share its objects, so for Azure only the URL
// counts. The digest keeps names out of saved and shared data.
func AccountOf(name string, u *url.URL, fingerprint string) string {
	account := strings.ToLower(u.Host) + " " + fingerprint
	switch {
	case name != "":
		account = "account " + name
	case IsAzure(u.Hostname()):
		account = strings.ToLower(u.Host)
	}
	sum := sha256.Sum256([]byte(account))
	return hex.EncodeToString(sum[:16])
}
