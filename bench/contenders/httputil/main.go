// Command httputil is the least that a proxy in Go can be: Go's own
// httputil.ReverseProxy, which sends each request to any of its backends.
package main

import (
	"flag"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	_ "net/http/pprof" // forces a collection, at /debug/pprof/heap?gc=1
	"strings"
)

func main() {
	address := flag.String("address", "", "where it listens")
	tlsAddress := flag.String("tls-address", "", "where it listens with TLS")
	admin := flag.String("admin", "", "where it tells of itself")
	cert := flag.String("cert", "", "the certificate")
	certKey := flag.String("cert-key", "", "the key of the certificate")
	key := flag.String("key", "", "what the backends ask for")
	backends := flag.String("backends", "", "host:port, ...")
	flag.Parse()

	hosts := strings.Split(*backends, ",")
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 256
	transport.MaxIdleConns = 0
	transport.DisableCompression = true
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = hosts[rand.IntN(len(hosts))]
			r.Out.Header.Set("Authorization", "Bearer "+*key)
		},
		Transport: transport,
	}
	go func() { log.Fatal(http.ListenAndServe(*admin, nil)) }()
	go func() { log.Fatal(http.ListenAndServeTLS(*tlsAddress, *cert, *certKey, proxy)) }()
	log.Fatal(http.ListenAndServe(*address, proxy))
}
