package azure

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/cloud"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
)

// identity requests tokens by way of azidentity.
//
// MSAL, below azidentity, remembers tokens and gives them again until five
// minutes before their end, or longer if the endpoint fails. That is of no use
// here, where a token is requested only to replace the one before, and there
// is no option against it, nor will there be
// (https://github.com/Azure/azure-workload-identity/issues/1582). So:
//
//   - A workload identity or a client secret gets a new credential object for
//     each token, as MSAL's memory is that object's. It also reads the secret
//     or the token file anew, whoever has rotated it.
//   - For managed identities the memory is the process's. MSAL passes it over
//     if the request has claims, and sends these nowhere, for the endpoints
//     have no parameter for them
//     (https://github.com/AzureAD/microsoft-authentication-library-for-go/issues/497).
//     What the endpoints themselves remember, as Azure's do for hours, is
//     beyond the reach of any client.
//   - The default chain stays with the credential that had a token first, and
//     is asked with claims if it gives the token before again: that is a
//     managed identity, or a tool such as the Azure CLI, which refuses claims
//     and keeps its token. Claims would go along to Entra in the first place.
//     Only a token that was refused is worth asking the whole chain again.
type identity struct {
	settings
	client *http.Client

	kept azcore.TokenCredential
}

// testRoots are the certificate authorities of tests.
var testRoots *x509.CertPool

func newIdentity(s settings) *identity {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	return &identity{settings: s, client: &http.Client{Transport: &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         dialer.DialContext,
		ForceAttemptHTTP2:   true,
		TLSHandshakeTimeout: 5 * time.Second,
		// enough for the requests of one token; the next one is an hour away
		IdleConnTimeout: 5 * time.Second,
		TLSClientConfig: &tls.Config{
			MinVersion:    tls.VersionTLS12,
			Renegotiation: tls.RenegotiateFreelyAsClient, // as in azcore's own
			RootCAs:       testRoots,
		},
	}}}
}

func (i *identity) clientOptions() policy.ClientOptions {
	o := policy.ClientOptions{
		Transport: i.client,
		Telemetry: policy.TelemetryOptions{ApplicationID: "caddy-openai-lb"},
		// Without these, azidentity tries IMDS six times over 2 to 25 seconds
		// each (setIMDSRetryOptionDefaults), and a hanging one for a minute
		// each; azcore tries Entra three times without a limit for each. The
		// source comes again by itself, and its users do not wait so long.
		Retry: policy.RetryOptions{
			MaxRetries:    2,
			TryTimeout:    10 * time.Second,
			RetryDelay:    500 * time.Millisecond,
			MaxRetryDelay: 3 * time.Second,
		},
	}
	if i.authority != "" {
		o.Cloud = cloud.Configuration{
			ActiveDirectoryAuthorityHost: i.authority,
			Services:                     map[cloud.ServiceName]cloud.ServiceConfiguration{},
		}
	}
	return o
}

// newCredential sets up a credential, without a request.
func (i *identity) newCredential() (credential azcore.TokenCredential, secret string, err error) {
	options, private := i.clientOptions(), i.privateAuthority()
	switch i.kind {
	case kindManagedIdentity:
		o := &azidentity.ManagedIdentityCredentialOptions{ClientOptions: options}
		switch {
		case i.settings.client != "":
			o.ID = azidentity.ClientID(i.settings.client)
		case i.object != "":
			o.ID = azidentity.ObjectID(i.object)
		case i.resource != "":
			o.ID = azidentity.ResourceID(i.resource)
		}
		credential, err = azidentity.NewManagedIdentityCredential(o)
	case kindWorkloadIdentity:
		credential, err = azidentity.NewWorkloadIdentityCredential(&azidentity.WorkloadIdentityCredentialOptions{
			ClientOptions:            options,
			TenantID:                 i.tenant,
			ClientID:                 i.settings.client,
			TokenFilePath:            i.tokenFile,
			DisableInstanceDiscovery: private,
		})
	case kindClientSecret:
		if secret, err = i.resolveSecret(); err != nil {
			return nil, "", err
		}
		credential, err = azidentity.NewClientSecretCredential(i.tenant, i.settings.client, secret,
			&azidentity.ClientSecretCredentialOptions{ClientOptions: options, DisableInstanceDiscovery: private})
	default:
		secret = os.Getenv("AZURE_CLIENT_SECRET")
		credential, err = azidentity.NewDefaultAzureCredential(&azidentity.DefaultAzureCredentialOptions{
			ClientOptions:            options,
			TenantID:                 i.tenant,
			DisableInstanceDiscovery: private,
		})
	}
	if err != nil {
		return nil, "", summarize(err, secret)
	}
	return credential, secret, nil
}

// withClaims makes MSAL ignore its cache.
const withClaims = "{}"

// token requests a token to replace the previous one, which a backend may
// have refused.
func (i *identity) token(ctx context.Context, previous string, refused bool) (azcore.AccessToken, error) {
	credential, secret := i.kept, os.Getenv("AZURE_CLIENT_SECRET")
	if credential == nil || refused {
		var err error
		if credential, secret, err = i.newCredential(); err != nil {
			return azcore.AccessToken{}, err
		}
	}
	o := policy.TokenRequestOptions{Scopes: []string{i.scope}}
	if i.kind == kindManagedIdentity {
		o.Claims = withClaims
	}
	received, err := credential.GetToken(ctx, o)
	if err != nil {
		if ctx.Err() != nil && errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			return azcore.AccessToken{}, &failure{message: "no answer within " + requestTimeout.String()}
		}
		return azcore.AccessToken{}, summarize(err, secret)
	}
	if i.kind == kindDefault {
		i.kept = credential
		if received.Token == previous {
			o.Claims = withClaims
			if fresh, err := credential.GetToken(ctx, o); err == nil {
				received = fresh
			}
		}
	}
	return received, nil
}
