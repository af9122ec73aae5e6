# The keys of callers, each with the limits that a virtual key would have.
from litellm.proxy._types import UserAPIKeyAuth, hash_token

KEYS = {
    {{- range .Callers}}
    "{{.Key}}": "{{.Name}}",
    {{- end}}
}


async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(
        api_key=hash_token(api_key), key_alias=KEYS[api_key],
        rpm_limit={{or .RequestsPerMinute "None"}}, tpm_limit={{or .TokensPerMinute "None"}})
